"""A model's mean state: what its states are like after English prose, whatever it says.

A replayed tail that begins with it instead of with zero states loses half as much or less (docs/method.md): what is left
out before the tail has written something, and in the long run that is what text in general writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tailreplay.engines.transformers.backbone import Backbone

TOKENS, EVERY, FIRST = 2048, 64, 256
SHARE = 0.5
"""Of the mean state in a start that is mixed with an anchor's states."""


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
    mean: list[torch.Tensor] = []
    count = 0
    for start in range(0, len(ids), every):
        if waits():
            return None
        backbone.forward(ids[start : start + every], start, past, None)
        states = backbone.states.read(past)
        if start + every < first or states is None:
            continue
        count += 1
        for held, state in zip(mean, states, strict=False):
            held.lerp_(state, 1 / count)
        if not mean:
            mean = [state.clone() for state in states]
    return mean or None


def begin_with(
    views: Sequence[torch.Tensor], mean: Sequence[torch.Tensor], recurrent: Sequence[bool], mixed: bool
) -> None:
    """Put the mean state into `views`, or, if `mixed`, mix it into the recurrent states that are there. Mutates `views`.

    Parameters
    ----------
    recurrent : sequence of bool
        Which of them are recurrent states; convolutions' inputs are not mixed.
    """
    for view, state, is_recurrent in zip(views, mean, recurrent, strict=True):
        if not mixed:
            view.copy_(state)
        elif is_recurrent:
            view.lerp_(state, SHARE)
