"""A model's mean state as evaluations want it: in a cache of the library's."""

from __future__ import annotations

from collections.abc import Sequence

from tailreplay.engines.transformers import HybridLM, compat
from tailreplay.engines.transformers.mean_state import mean_states
from tailreplay.errors import InvalidRequestError
from tailreplay.mean_states import EVERY, FIRST, TOKENS
from tailreplay.prose import calibration_text

__all__ = ["TOKENS", "blend", "calibration_text", "mean_state"]


def mean_state(lm: HybridLM, ids: Sequence[int], every: int = EVERY, first: int = FIRST) -> compat.DynamicCache:
    """Return the mean of the states after every so many tokens of a text, from its `first` token on.

    Parameters
    ----------
    ids : sequence of int
        More than `first` tokens; the first `TOKENS` are used.

    Raises
    ------
    InvalidRequestError
        If the text is too short.
    """
    backbone = lm.backbone
    with lm.lock:
        mean = mean_states(backbone, ids, every, first)
    if mean is None:
        raise InvalidRequestError(f"A mean state needs more than {first} tokens of text.")
    cache = compat.new_cache(backbone.config)
    for view, state in zip(backbone.states.make(cache, backbone.device), mean, strict=True):
        view.copy_(state)
    return cache


def blend(target: compat.DynamicCache, other: compat.DynamicCache, layers: Sequence[int], share: float) -> None:
    """Move recurrent states by `share` of the way to `other`'s. Mutates `target`; convolution states stay as they are."""
    for layer in layers:
        state, towards = compat.states(target, layer)[1], compat.states(other, layer)[1]
        if state is not None and towards is not None:
            state.lerp_(towards.to(state.dtype), share)
