"""Recurrent layers run outside vLLM's own forward, on states in vLLM's own cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig

from tailreplay.engines.vllm.compat.geometry import Geometry
from tailreplay.pages import PartSpec


class StateBatch:
    """Runs recurrent layers on several sequences at once, outside vLLM's own forward.

    Parameters
    ----------
    config : VllmConfig
    kv_cache : KVCacheConfig
    geometry : Geometry
    """

    def __init__(self, config: VllmConfig, kv_cache: KVCacheConfig, geometry: Geometry, device: torch.device) -> None:
        self._config = config
        self._device = device
        # A pipeline stage may hold no layer of a group.
        self._groups = {index: names for index, names in geometry.state_groups.items() if names}
        self._aligned = geometry.aligned_states
        self._block_size = geometry.block_size
        # In prefix-caching mode some builders also export a state in mid-chunk, to a block that replay does not have.
        specs = {
            index: replace(kv_cache.kv_cache_groups[index].kv_cache_spec, num_prefill_checkpoint_blocks=0)
            for index in self._groups
        }
        layers = config.compilation_config.static_forward_context
        self._layers = layers
        self._builders = {
            index: layers[names[0]].get_attn_backend().get_builder_cls()(specs[index], list(names), config, device)
            for index, names in self._groups.items()
        }

    @contextmanager
    def running(self, done: Sequence[int], counts: Sequence[int], blocks: Sequence[dict[int, int]]) -> Iterator[None]:
        """Let layers called inside read and write the states of these sequences.

        Parameters
        ----------
        done : sequence of int
            Tokens each sequence has before; 0 starts from the zero state, any other number from what is in its blocks.
        counts : sequence of int
            Tokens each sequence runs now, concatenated in this order.
        blocks : sequence of dict
            Block of each state group that holds a sequence's state, whatever its length.
        """
        starts = torch.tensor([0, *torch.tensor(list(counts)).cumsum(0).tolist()], dtype=torch.int32)
        lengths = torch.tensor([before + now for before, now in zip(done, counts, strict=True)], dtype=torch.int32)
        total = int(starts[-1])
        # With states at their last token's block, vLLM looks them up by column: here every column is the same block.
        columns = -(-int(lengths.max()) // self._block_size) if self._aligned else 1
        metadata: dict[str, Any] = {}
        for index, names in self._groups.items():
            table = torch.tensor([[block[index]] * columns for block in blocks], dtype=torch.int32, device=self._device)
            common = CommonAttentionMetadata(
                query_start_loc=starts.to(self._device),
                query_start_loc_cpu=starts,
                seq_lens=lengths.to(self._device),
                num_reqs=len(counts),
                num_actual_tokens=total,
                max_query_len=max(counts),
                max_seq_len=int(lengths.max()),
                block_table_tensor=table,
                slot_mapping=torch.zeros(total, dtype=torch.long, device=self._device),
                is_prefilling=torch.ones(len(counts), dtype=torch.bool),
                seq_lens_cpu_upper_bound=lengths,
            )
            built = self._builders[index].build(0, common)
            metadata.update(dict.fromkeys(names, built))
        with set_forward_context(metadata, self._config, num_tokens=total):
            yield

    def zero(self, blocks: dict[int, int]) -> None:
        """Set the states in `blocks` to zero."""
        for index, names in self._groups.items():
            for name in names:
                for state in self._layers[name].kv_cache:
                    state[blocks[index]].zero_()

    @property
    def parts(self) -> list[PartSpec]:
        """Tensors of one sequence's states, in the order of `views`."""
        return [
            PartSpec(f"{name}:{at}", tuple(state.shape[1:]), state.dtype)
            for names in self._groups.values()
            for name in names
            for at, state in enumerate(self._layers[name].kv_cache)
        ]

    @property
    def recurrent(self) -> list[bool]:
        """Which of `parts` are recurrent states; convolutions' inputs come before them in each layer."""
        return [
            0 < at == len(self._layers[name].kv_cache) - 1
            for names in self._groups.values()
            for name in names
            for at in range(len(self._layers[name].kv_cache))
        ]

    def views(self, blocks: dict[int, int]) -> list[torch.Tensor]:
        """Return the states in `blocks`, to be read or written."""
        return [
            state[blocks[index]]
            for index, names in self._groups.items()
            for name in names
            for state in self._layers[name].kv_cache
        ]

    def read(self, blocks: dict[int, int]) -> dict[str, list[torch.Tensor]]:
        """Return copies of the states in `blocks`, by layer name. For checks."""
        return {
            name: [state[blocks[index]].clone() for state in self._layers[name].kv_cache]
            for index, names in self._groups.items()
            for name in names
        }
