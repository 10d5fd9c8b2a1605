"""A model's mean state as evaluations want it: in a cache of the library's."""

from __future__ import annotations

from collections.abc import Sequence

from tailreplay.engines.transformers import HybridLM, compat
from tailreplay.engines.transformers.backbone import Backbone
from tailreplay.engines.transformers.mean_state import mean_states
from tailreplay.errors import InvalidRequestError
from tailreplay.mean_states import EVERY, FIRST, TOKENS, begin_with
from tailreplay.prose import calibration_text

__all__ = ["TOKENS", "calibration_text", "mean_state", "mix"]


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


def mix(backbone: Backbone, target: compat.DynamicCache, mean: compat.DynamicCache) -> None:
    """Mix the mean state into the recurrent states of `target`, as the engines do for a "mixed" start. Mutates `target`."""
    specs = backbone.states
    views, states = specs.read(target), specs.read(mean)
    assert views is not None
    assert states is not None
    begin_with(views, states, specs.recurrent, mixed=True)
