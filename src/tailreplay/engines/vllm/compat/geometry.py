"""How one engine lays out its cache, read from the configuration before any tensor exists."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MambaSpec

from tailreplay.errors import CacheConfigError
from tailreplay.layer_types import layer_types_of
from tailreplay.pages import PartSpec, state_codec
from tailreplay.topology import Topology
from tailreplay.weights import weights_stamp

_ELSEWHERE = ("_name_or_path", "transformers_version")
CONNECTOR = "TailReplayConnector"
PAGE_TOKENS = 64
# Attention kernels whose cache keeps each token's keys and values apart, so that tokens can be cut out of a block.
SLICEABLE = frozenset(
    {
        "FLASH_ATTN",
        "FLASHINFER",
        "TRITON_ATTN",
        "FLASHMLA",
        "FLASH_ATTN_MLA",
        "FLASHINFER_MLA",
        "CUTLASS_MLA",
        "TRITON_MLA",
    }
)


@dataclass(frozen=True)
class Geometry:
    """How the cache is laid out.

    Attributes
    ----------
    block_size : int
        Tokens of one attention block.
    page_size : int
        Tokens of one page: 64 where tokens can be cut out of a block, else the block.
    attention_group : int
        Index of the KV cache group of the attention layers.
    attention_layers : tuple of str
        Names of those that this rank holds.
    state_groups : dict
        Index of each group of recurrent layers -> their names.
    aligned_states : bool
        Whether a state lies in the block of its last token (vLLM's own prefix caching), or always in the first.
    kv_token_bytes : int
        Bytes of one token in one attention layer of one rank.
    d_model : int
    dtype : torch.dtype
        Of hiddens.
    stages : tuple of Topology
        Of each pipeline stage.
    stage : int
        This rank's.
    tensor_ranks : int
        Ranks that hold a stage together.
    kernels : str
        vLLM's attention backend: how keys and values lie in a block is its affair.
    state_parts : tuple of PartSpec
        Tensors of the states of one recurrent layer of one rank, of the layers that need most. Not part of any page's name.
    """

    block_size: int
    page_size: int
    attention_group: int
    attention_layers: tuple[str, ...]
    state_groups: dict[int, tuple[str, ...]]
    aligned_states: bool
    kv_token_bytes: int
    d_model: int
    dtype: torch.dtype
    stages: tuple[Topology, ...]
    stage: int
    tensor_ranks: int
    kernels: str = ""
    state_parts: tuple[PartSpec, ...] = field(default=(), repr=False)

    @property
    def topology(self) -> Topology:
        """Groups that this rank captures and replays."""
        return self.stages[self.stage]

    @property
    def is_sliceable(self) -> bool:
        """Whether pages are cut out of blocks."""
        return self.page_size != self.block_size

    @property
    def hidden_width(self) -> int:
        """Elements of each hidden that one rank stores."""
        return self.d_model // self.tensor_ranks

    @property
    def whole(self) -> Topology:
        """Groups of all stages: what a plan must satisfy on each of them."""
        groups = tuple(group for stage in self.stages for group in stage.groups)
        return Topology(tuple(kind for stage in self.stages for kind in stage.kinds), groups)

    @property
    def ranks(self) -> tuple[str, ...]:
        """Names of all ranks that each hold a share of every page."""
        count = len(self.stages) * self.tensor_ranks
        return tuple(f"{index}/{count}" for index in range(count))

    def rank_name(self, tensor_rank: int) -> str:
        """Name of a rank of this stage."""
        return self.ranks[self.stage * self.tensor_ranks + tensor_rank]

    def page_bytes(self, codec: str = "none") -> tuple[int, int]:
        """Return the bytes of one page and of its hiddens on the ranks that need most: every rank has as many slots.

        Parameters
        ----------
        codec : str
            In which host memory holds hiddens.
        """
        kv = max(len(stage.attention_layers) for stage in self.stages) * self.kv_token_bytes
        token = PartSpec("hidden", (self.hidden_width,), self.dtype, codec).token_bytes
        hidden = max(len(stage.stored_groups) for stage in self.stages) * token
        return self.page_size * (kv + hidden), self.page_size * hidden

    def anchor_bytes(self, codec: str = "none") -> int:
        """Return the bytes of one saved state on the ranks that need most: every rank has as many slots."""
        layers = max(sum(len(group.stateful) for group in stage.groups) for stage in self.stages)
        return layers * sum(replace(part, codec=state_codec(part, codec)).token_bytes for part in self.state_parts)

    def state_blocks(self, blocks: tuple[list[int], ...], computed: int) -> dict[int, int]:
        """Return the block of each state group where the forward after `computed` tokens finds a request's state."""
        column = (computed - 1) // self.block_size if self.aligned_states else 0
        return {group: blocks[group][column] for group in self.state_groups}


def is_configured(config: VllmConfig) -> bool:
    """Whether this engine was started with our connector."""
    transfer = config.kv_transfer_config
    return transfer is not None and transfer.kv_connector == CONNECTOR


def topology_of(config: VllmConfig) -> Topology:
    """Return the groups of the model that vLLM is about to run."""
    return Topology.from_layer_types(layer_types_of(config.model_config.hf_text_config))


def stages_of(config: VllmConfig) -> tuple[Topology, ...]:
    """Return the groups of each pipeline stage, by the borders that vLLM draws."""
    from vllm.distributed.utils import get_pp_indices

    topology = topology_of(config)
    count = config.parallel_config.pipeline_parallel_size
    stages = topology.stages([get_pp_indices(len(topology.kinds), stage, count) for stage in range(count)])
    if not all(stage.attention_layers for stage in stages):
        # Its slots tell where a request's tokens are in a batch.
        raise CacheConfigError(
            "tailreplay needs a full-attention layer in every pipeline stage: choose fewer stages, or other borders with "
            "VLLM_PP_LAYER_PARTITION."
        )
    return stages


def stage_of(config: VllmConfig) -> int:
    """Return the pipeline stage of this process; the scheduler, which is in none, counts as the first."""
    parallel = config.parallel_config
    rank: int = parallel.rank
    tensor_ranks: int = parallel.tensor_parallel_size
    stages: int = parallel.pipeline_parallel_size
    return rank // tensor_ranks % stages


def geometry(config: VllmConfig, kv_cache: KVCacheConfig) -> Geometry:
    """Read the layout.

    Raises
    ------
    CacheConfigError
        If the engine runs in a way that is not supported; one sentence.
    """
    _refuse(config)
    attention: list[int] = []
    states: dict[int, tuple[str, ...]] = {}
    parts: tuple[PartSpec, ...] = ()
    for index, group in enumerate(kv_cache.kv_cache_groups):
        if isinstance(group.kv_cache_spec, MambaSpec):
            states[index] = tuple(group.layer_names)
            parts = max(parts, _state_parts(group.kv_cache_spec), key=lambda each: sum(p.token_bytes for p in each))
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
    parallel = config.parallel_config
    d_model = config.model_config.get_hidden_size()
    if d_model % parallel.tensor_parallel_size:
        raise CacheConfigError(
            f"tailreplay cannot share hiddens of width {d_model} between {parallel.tensor_parallel_size} ranks."
        )
    aligned = config.cache_config.mamba_cache_mode == "align"
    page = spec.block_size
    kernels = attention_kernels(config, list(group.layer_names))
    if kernels in SLICEABLE:
        # vLLM's own hits end at its blocks' borders, and what follows can be stored only if a page ends there too.
        page = gcd(PAGE_TOKENS, page) if aligned else min(PAGE_TOKENS, page)
    return Geometry(
        block_size=spec.block_size,
        page_size=page,
        attention_group=attention[0],
        attention_layers=tuple(group.layer_names),
        state_groups=states,
        aligned_states=aligned,
        kv_token_bytes=spec.real_page_size_bytes // spec.block_size,
        d_model=d_model,
        dtype=config.model_config.dtype,
        stages=stages_of(config),
        stage=stage_of(config),
        tensor_ranks=parallel.tensor_parallel_size,
        kernels=kernels,
        state_parts=parts,
    )


def _state_parts(spec: MambaSpec) -> tuple[PartSpec, ...]:
    """Return the tensors that one layer keeps."""
    pairs = zip(spec.shapes, spec.dtypes, strict=True)
    return tuple(PartSpec(f"state{index}", tuple(shape), dtype) for index, (shape, dtype) in enumerate(pairs))


def attention_kernels(config: VllmConfig, layers: list[str]) -> str:
    """Return the name of vLLM's attention backend, "" if the layers have different ones."""
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

    names = {backend.get_name() for backend in get_current_attn_backends(config, layers)}
    return names.pop() if len(names) == 1 else ""


def _refuse(config: VllmConfig) -> None:
    """Raise for what would give wrong numbers."""
    if config.speculative_config is not None:
        raise CacheConfigError("tailreplay does not support speculative decoding in vLLM yet: start without it.")
    mode = config.cache_config.mamba_cache_mode
    if mode not in ("none", "align"):
        raise CacheConfigError(f"tailreplay does not know vLLM's mamba cache mode '{mode}': use 'none' or 'align'.")
    if config.cache_config.use_replayssm:
        raise CacheConfigError("tailreplay cannot restore the states that --use-replayssm keeps: start without it.")
    if config.lora_config is not None:
        raise CacheConfigError(
            "tailreplay cannot replay through LoRA adapters in vLLM yet: start without --enable-lora."
        )
    parallel = config.parallel_config
    if parallel.data_parallel_size > 1 and config.model_config.is_moe:
        raise CacheConfigError(
            "tailreplay does not support data parallelism of models with experts in vLLM, whose engines step together: "
            "start one engine each."
        )
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise CacheConfigError("tailreplay does not support context parallelism in vLLM: start without it.")


def fingerprint(config: VllmConfig, outlasts: bool = False) -> str:
    """Return all of the configuration that numbers in a cache depend on, as text.

    Parameters
    ----------
    outlasts : bool
        Whether the cache outlasts this process or is shared with others: then the weights' own bytes count, too, and what
        the layout of a cache block may depend on.
    """
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    fields: tuple[Any, ...] = (
        model.model,
        model.revision,
        str(model.dtype),
        model.quantization,
        cache.cache_dtype,
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
    )
    if outlasts:
        load = config.load_config
        own = (vllm.__version__, torch.backends.cpu.get_cpu_capability(), str(load.load_format), model.seed)
        # The configuration as it is in force: overrides change numbers and are in no file. Where the model lies does not.
        named = {key: value for key, value in model.hf_config.to_dict().items() if key not in _ELSEWHERE}
        text = json.dumps(named, sort_keys=True, default=str)
        fields = (weights_stamp(model.model, model.revision), *fields[2:], *own, text)
    return repr(fields)
