"""Floating-point operations of each layer, counted from its modules."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from tailreplay.costs import LayerCost
from tailreplay.engines.transformers.families.generic import Family
from tailreplay.pages import PageLayout
from tailreplay.topology import LayerKind, Topology


def layer_costs(
    layers: torch.nn.ModuleList,
    family: Family,
    config: PretrainedConfig,
    topology: Topology,
    layout: PageLayout,
    states: dict[int, list[torch.Tensor]],
) -> tuple[LayerCost, ...]:
    """Count the operations of every layer.

    Parameters
    ----------
    states : dict
        Recurrent and convolution states by layer, of one sequence; only their shapes are read.
    """
    pairs = dict(zip(topology.attention_layers, layout.kv, strict=True))
    costs = []
    for index, (layer, kind) in enumerate(zip(layers, topology.kinds, strict=True)):
        total = _matmuls(layer, _active_share(config))
        if kind is LayerKind.FFN:
            costs.append(LayerCost(mixer=0.0, ffn=total))
            continue
        mixer = _matmuls(family.mixer(layer), 1.0)
        per_pair = 0.0
        recurrence = 0.0
        if kind is LayerKind.ATTENTION:
            keys, values = pairs[index]
            per_pair = 2.0 * config.num_attention_heads * (keys.shape[-1] + values.shape[-1])
        else:
            # Recurrent states are (heads, key, value) after the batch; convolution states (channels, width).
            recurrence = sum(family.state_ops * state.numel() for state in states[index] if state.dim() == 4)
        costs.append(LayerCost(mixer=mixer + recurrence, ffn=total - mixer, per_pair=per_pair))
    return tuple(costs)


def _active_share(config: PretrainedConfig) -> float:
    """Share of the routed experts that one token uses."""
    chosen = getattr(config, "num_experts_per_tok", None)
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        experts = getattr(config, name, None)
        if experts and chosen:
            return float(chosen) / float(experts)
    return 1.0


def _matmuls(module: torch.nn.Module, expert_share: float) -> float:
    """Two operations a weight of every matrix; stacked expert weights (three dimensions) count by their active share."""
    total = 0.0
    for name, weight in module.named_parameters():
        if weight.dim() == 2:
            total += 2.0 * weight.numel()
        elif weight.dim() == 3:
            # A depthwise convolution's weight is (channels, 1, width); it is used wholly.
            total += 2.0 * weight.numel() * (1.0 if weight.shape[1] == 1 or "conv" in name else expert_share)
    return total
