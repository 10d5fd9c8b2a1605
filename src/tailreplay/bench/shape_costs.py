"""Costs of real models by arithmetic alone: neither torch nor a config file is needed."""

from __future__ import annotations

from tailreplay.costs import CostModel, LayerCost
from tailreplay.topology import LayerKind, Topology

# The figures of Qwen3.5-4B's config.
_LAYERS, _EVERY = 32, 4
_WIDTH, _FFN = 2560, 9216
_HEADS, _KV_HEADS, _HEAD_DIM = 16, 4, 256
_KEY_HEADS, _VALUE_HEADS, _LINEAR_DIM = 16, 32, 128
_KERNEL, _VOCABULARY = 4, 248_320
_BF16, _FP32 = 2, 4


def qwen35_4b() -> CostModel:
    """Return the costs of Qwen3.5-4B in bfloat16, as `tailreplay inspect` counts them from its config."""
    topology = Topology.from_layer_types(
        (["linear_attention"] * (_EVERY - 1) + ["full_attention"]) * (_LAYERS // _EVERY)
    )
    ffn = 2.0 * 3 * _WIDTH * _FFN
    attention = LayerCost(
        # Queries with their gates, keys and values, output.
        mixer=2.0 * _WIDTH * _HEAD_DIM * (2 * _HEADS + 2 * _KV_HEADS + _HEADS),
        ffn=ffn,
        per_pair=4.0 * _HEADS * _HEAD_DIM,
    )
    linear = LayerCost(_linear_mixer(), ffn)
    return CostModel(
        topology,
        tuple(attention if kind is LayerKind.ATTENTION else linear for kind in topology.kinds),
        head=2.0 * _WIDTH * _VOCABULARY,
        kv_bytes=len(topology.attention_layers) * 2 * _KV_HEADS * _HEAD_DIM * _BF16,
        hidden_bytes=(_WIDTH * _BF16,) * len(topology.stored_groups),
        state_bytes=sum(kind is LayerKind.LINEAR for kind in topology.kinds) * _state_bytes(),
    )


def _linear_mixer() -> float:
    keys, values = _KEY_HEADS * _LINEAR_DIM, _VALUE_HEADS * _LINEAR_DIM
    projections = _WIDTH * (2 * keys + 2 * values + 2 * _VALUE_HEADS) + values * _WIDTH
    convolution = (2 * keys + values) * _KERNEL
    recurrence = 6.0 * _VALUE_HEADS * _LINEAR_DIM * _LINEAR_DIM
    return 2.0 * (projections + convolution) + recurrence


def _state_bytes() -> int:
    channels = (2 * _KEY_HEADS + _VALUE_HEADS) * _LINEAR_DIM
    return _VALUE_HEADS * _LINEAR_DIM * _LINEAR_DIM * _FP32 + channels * _KERNEL * _BF16
