"""What is known of a model before it is loaded: whether it can be evaluated, its longest prompt, its cache's size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tailreplay.engines.transformers.backbone import Backbone
from tailreplay.engines.transformers.describe import describe
from tailreplay.errors import InvalidRequestError, UnsupportedModelError
from tailreplay.sizes import parse_bytes

# A cache for the longest context of a model that takes a million tokens would not fit most machines.
_MOST_BYTES = 16 << 30


@dataclass(frozen=True)
class Sizing:
    """Longest sequence in tokens, the answer included, and the cache's size in bytes."""

    max_length: int
    host_bytes: int


def size_up(
    model: str, max_length: int | None = None, host_bytes: int | str | None = None, dtype: str = "auto", **kwargs: Any
) -> Sizing:
    """Look at a model's config. No weights are read.

    Parameters
    ----------
    max_length : int, optional
        The model's own limit if not given.
    host_bytes : int or str, optional
        Room for one context of `max_length` tokens if not given, but at most 16 GiB.
    dtype : str
        "auto" is the checkpoint's own.
    **kwargs
        Go to ``AutoConfig.from_pretrained``.

    Raises
    ------
    UnsupportedModelError
        If the model cannot be loaded or replayed, or has no linear layers.
    InvalidRequestError
        If `max_length` is above the model's limit, or dtype is none.
    """
    backbone = describe(model, _dtype(dtype), **kwargs)
    check_hybrid(backbone)
    longest = longest_sequence(backbone, max_length)
    if host_bytes is not None:
        return Sizing(longest, parse_bytes(host_bytes))
    layout = backbone.layout
    pages = -(-longest // layout.page_size)
    return Sizing(longest, min(pages * layout.page_bytes, max(_MOST_BYTES, layout.page_bytes)))


def check_hybrid(backbone: Backbone) -> None:
    """Refuse a model without linear layers."""
    if not backbone.topology.is_hybrid:
        raise UnsupportedModelError(
            "This model has no linear layers: its prefixes are reused exactly and there is nothing to compare."
        )


def longest_sequence(backbone: Backbone, max_length: int | None) -> int:
    """Return the longest sequence to use: what is asked for, within the model's limit."""
    limit = backbone.max_tokens
    if max_length is None and limit is None:
        raise InvalidRequestError("The model's config names no longest sequence: say max_length.", "max_length")
    if max_length is not None and max_length < 2:
        raise InvalidRequestError(f"max_length must be at least 2, got {max_length}.", "max_length")
    if max_length is not None and limit is not None and max_length > limit:
        raise InvalidRequestError(
            f"max_length {max_length} is above the model's limit of {limit} tokens.", "max_length"
        )
    return min(length for length in (max_length, limit) if length is not None)


def _dtype(name: str) -> torch.dtype | None:
    if name == "auto":
        return None
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidRequestError(f"'{name}' is not a dtype: bfloat16, float16 or float32, say.", "dtype")
    return dtype
