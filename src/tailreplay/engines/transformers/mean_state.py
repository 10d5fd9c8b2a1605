"""A model's mean state (see `tailreplay.mean_states`), from a prefill of a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tailreplay.engines.transformers.backbone import Backbone
from tailreplay.mean_states import EVERY, FIRST, TOKENS, RunningMean


@torch.inference_mode()
def mean_states(
    backbone: Backbone,
    ids: Sequence[int],
    every: int = EVERY,
    first: int = FIRST,
    waits: Callable[[], bool] = lambda: False,
) -> list[torch.Tensor] | None:
    """Return the mean of the states after every so many tokens of a text, from its `first` token on.

    Parameters
    ----------
    ids : sequence of int
        More than `first` tokens; the first `TOKENS` are used.
    waits : callable
        Whether to give up; asked every `every` tokens.

    Returns
    -------
    list of torch.Tensor or None
        One for each part of the layout's `anchor`; None if it was given up, or the model has no states.
    """
    ids = list(ids[:TOKENS])
    past = backbone.new_cache(len(ids))
    mean = RunningMean()
    for start in range(0, len(ids), every):
        if waits():
            return None
        backbone.forward(ids[start : start + every], start, past, None)
        states = backbone.states.read(past)
        if start + every >= first and states is not None:
            mean.add(states)
    return mean.result() or None
