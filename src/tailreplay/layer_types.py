"""Layer types of a model from its config, in any of the spellings that configs use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tailreplay.errors import UnsupportedModelError

# Nemotron-H's ``hybrid_override_pattern``, one character a layer.
_TYPE_OF_CHARACTER = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def layer_types_of(config: Any) -> list[str]:
    """Return one type name per layer, for `Topology.from_layer_types`.

    Parameters
    ----------
    config : object
        A model's (text) config: one with ``layer_types``, ``layers_block_type``, Nemotron-H's ``hybrid_override_pattern``
        or Kimi-Linear's ``linear_attn_config``.

    Raises
    ------
    UnsupportedModelError
        If the config names no layer types, or contradicts itself.
    """
    for name in ("layer_types", "layers_block_type"):
        types = getattr(config, name, None)
        if types:
            return [str(layer_type) for layer_type in types]
    pattern = getattr(config, "hybrid_override_pattern", None)
    if pattern:
        return _from_pattern(pattern)
    linear = getattr(config, "linear_attn_config", None)
    if linear:
        return _from_lists(linear, config.num_hidden_layers)
    model_type = getattr(config, "model_type", type(config).__name__)
    raise UnsupportedModelError(f"The config of model type '{model_type}' does not name its layer types.")


def _from_pattern(pattern: str) -> list[str]:
    unknown = sorted(set(pattern) - set(_TYPE_OF_CHARACTER))
    if unknown:
        raise UnsupportedModelError(
            f"The config's hybrid_override_pattern has unknown layers {', '.join(map(repr, unknown))}; "
            f"known are {', '.join(map(repr, _TYPE_OF_CHARACTER))}."
        )
    return [_TYPE_OF_CHARACTER[character] for character in pattern]


def _from_lists(linear: Mapping[str, Any], count: int) -> list[str]:
    # The lists count layers from 1.
    kda, full = set(linear.get("kda_layers") or ()), set(linear.get("full_attn_layers") or ())
    if kda & full or not kda | full >= set(range(1, count + 1)):
        raise UnsupportedModelError(
            f"The config's linear_attn_config must put each of the {count} layers in one of its two lists."
        )
    return ["linear_attention" if layer in kda else "full_attention" for layer in range(1, count + 1)]
