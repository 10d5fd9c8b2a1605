"""A model's mean state: what its states are like after English prose, whatever it says.

A replayed tail that begins with it instead of with zero states loses, at r = 5%, half as much (docs/method.md): what is
left out before the tail has written something, and in the long run that is what text in general writes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

TOKENS, EVERY, FIRST = 2048, 64, 256
"""Of the text that it is made from: its length, and after how many tokens its states are taken, from which on."""
SHARE = 0.5
"""Of the mean state in a start that is mixed with an anchor's states."""


class RunningMean:
    """The mean of states that come one after the other."""

    def __init__(self) -> None:
        self._mean: list[torch.Tensor] = []
        self._dtypes: list[torch.dtype] = []
        self.count = 0

    def add(self, states: Sequence[torch.Tensor]) -> None:
        """Take one more of each state; they may change afterwards. Mutates self."""
        self.count += 1
        if self.count == 1:
            self._dtypes = [state.dtype for state in states]
            self._mean = [state.to(torch.promote_types(state.dtype, torch.float32), copy=True) for state in states]
            return
        for held, state in zip(self._mean, states, strict=True):
            held.lerp_(state.to(held.dtype), 1 / self.count)

    def result(self) -> list[torch.Tensor]:
        """Return the means, in the dtypes of the states."""
        return [held.to(dtype) for held, dtype in zip(self._mean, self._dtypes, strict=True)]


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
