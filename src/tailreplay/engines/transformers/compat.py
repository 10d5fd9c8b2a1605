"""Differences between transformers versions (5.16 to the newest), in one place.

The argument that hands a cache to a layer or a model is ``past_key_values`` up to 5.19 and ``cache`` later (a mixer's
was ``cache_params``). So it is read from the signature instead of the version.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin, LinearAttentionLayer

_CACHE_NAMES = ("cache", "past_key_values", "cache_params")


@lru_cache(maxsize=256)
def _parameters(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def cache_argument(forward: Callable[..., Any]) -> str:
    """Name of the parameter of `forward` that takes the cache."""
    names = _parameters(forward)
    for name in _CACHE_NAMES:
        if name in names:
            return name
    raise TypeError(f"{forward} takes no cache under a known name.")


def call_layer(
    layer: torch.nn.Module, hidden: torch.Tensor, positions: torch.Tensor, cache: DynamicCache
) -> torch.Tensor:
    """Run one decoder layer by itself, without a mask. Mutates `cache`.

    Parameters
    ----------
    hidden : torch.Tensor
        Layer input, shape ``(1, n, d_model)``.
    positions : torch.Tensor
        Absolute positions, shape ``(1, n)``, int64.

    Returns
    -------
    torch.Tensor
        Layer output, shape ``(1, n, d_model)``.
    """
    forward = type(layer).forward
    given = {"attention_mask": None, "position_ids": positions, "position_embeddings": None}
    names = _parameters(forward)
    arguments = {name: value for name, value in given.items() if name in names}
    arguments[cache_argument(forward)] = cache
    output = layer(hidden, **arguments)
    # Some families return (hidden, attention weights).
    result: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return result


def call_model(
    model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor, cache: DynamicCache, keep: int = 1
) -> torch.Tensor:
    """Run the model over `ids` after what `cache` holds. Mutates `cache`.

    Parameters
    ----------
    ids, positions : torch.Tensor
        Token ids and absolute positions, shape ``(1, n)``, int64.
    keep : int
        How many of the last tokens' logits to compute, at least 1.

    Returns
    -------
    torch.Tensor
        Logits after each of the last `keep` tokens, shape ``(keep, vocabulary)``.
    """
    return batch_logits(model, ids, positions, cache, keep)[0]


def batch_logits(
    model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor, cache: DynamicCache, keep: int
) -> torch.Tensor:
    """Run the model over rows of `ids` after what `cache` holds. Mutates `cache`.

    Parameters
    ----------
    ids, positions : torch.Tensor
        Token ids and absolute positions, shape ``(rows, n)``, int64.
    keep : int
        Positions from the end whose logits are wanted.

    Returns
    -------
    torch.Tensor
        Shape ``(rows, keep, vocabulary)``.
    """
    forward = type(model).forward
    arguments: dict[str, Any] = {cache_argument(forward): cache, "use_cache": True, "position_ids": positions}
    if "logits_to_keep" in _parameters(forward):
        arguments["logits_to_keep"] = keep
    logits: torch.Tensor = model(ids, **arguments).logits[:, -keep:]
    return logits


def layer_types(config: PretrainedConfig) -> list[str]:
    """Layer types of a text config; models that do not name them have one attention kind throughout."""
    for name in ("layer_types", "layers_block_type"):
        types = getattr(config, name, None)
        if types is not None:
            return list(types)
    sliding = getattr(config, "sliding_window", None) is not None
    return ["sliding_attention" if sliding else "full_attention"] * config.num_hidden_layers


def new_cache(config: PretrainedConfig) -> DynamicCache:
    """Return an empty cache with one entry a layer."""
    return DynamicCache(config=config)


def states(cache: DynamicCache, layer: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the (convolution, recurrent) state of a linear layer, each None where the layer has none."""
    entry = cache.layers[layer]
    return entry.conv_states[0], entry.recurrent_states[0]


def conv_width(cache: DynamicCache, layer: int) -> int:
    """Return the width of a linear layer's convolution."""
    width: int = cache.layers[layer].conv_kernel_size[0]
    return width


def make_state(cache: DynamicCache, layer: int, kind: str, like: torch.Tensor, width: int) -> torch.Tensor:
    """Give an empty linear layer a state, as if it had seen tokens, and return it to be filled. Mutates `cache`.

    Parameters
    ----------
    kind : str
        "conv" or "recurrent".
    like : torch.Tensor
        Of the state's shape (batch first), dtype and device.
    width : int
        Of the convolution.
    """
    entry = cache.layers[layer]
    if kind == "conv":
        entry.lazy_initialization(conv_states=like, state_idx=0, conv_kernel_size=width)
    else:
        entry.lazy_initialization(recurrent_states=like, state_idx=0)
    entry.has_previous_state[0] = True
    state: torch.Tensor = (entry.conv_states if kind == "conv" else entry.recurrent_states)[0]
    return state


def copy_states(source: DynamicCache, target: DynamicCache) -> None:
    """Copy every recurrent and convolution state of `source` into the empty cache `target`."""
    for old, new in zip(source.layers, target.layers, strict=True):
        if not isinstance(old, LinearAttentionCacheLayerMixin):
            continue
        for index, seen in old.has_previous_state.items():
            conv, recurrent = old.conv_states[index], old.recurrent_states[index]
            if conv is not None:
                width = old.conv_kernel_size[index]
                new.lazy_initialization(conv_states=conv, state_idx=index, conv_kernel_size=width)
                new.conv_states[index].copy_(conv)
            if recurrent is not None:
                new.lazy_initialization(recurrent_states=recurrent, state_idx=index)
                new.recurrent_states[index].copy_(recurrent)
            new.has_previous_state[index] = seen


def stack_states(sources: Sequence[DynamicCache], target: DynamicCache) -> None:
    """Copy the states of one-row caches into the rows of the empty cache `target`; zeros where a source has none."""
    for layer, new in enumerate(target.layers):
        if not isinstance(new, LinearAttentionCacheLayerMixin):
            continue
        entries = [source.layers[layer] for source in sources]
        for index in new.has_previous_state:
            conv, recurrent = (_stacked(entries, name, index) for name in ("conv_states", "recurrent_states"))
            if conv is not None:
                width = next(width for entry in entries if (width := entry.conv_kernel_size[index]) is not None)
                new.lazy_initialization(conv_states=conv, state_idx=index, conv_kernel_size=width)
                new.conv_states[index].copy_(conv)
            if recurrent is not None:
                new.lazy_initialization(recurrent_states=recurrent, state_idx=index)
                new.recurrent_states[index].copy_(recurrent)
            new.has_previous_state[index] = conv is not None or recurrent is not None


def _stacked(entries: list[Any], name: str, index: int) -> torch.Tensor | None:
    rows = [getattr(entry, name)[index] for entry in entries]
    like = next((row for row in rows if row is not None), None)
    return None if like is None else torch.cat([torch.zeros_like(like) if row is None else row for row in rows])


__all__ = [
    "DynamicCache",
    "DynamicLayer",
    "LinearAttentionLayer",
    "batch_logits",
    "cache_argument",
    "call_layer",
    "call_model",
    "conv_width",
    "copy_states",
    "layer_types",
    "make_state",
    "new_cache",
    "stack_states",
    "states",
]
