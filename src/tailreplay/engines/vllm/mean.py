"""The model's mean state in vLLM: made by the worker from the replay of a text, begun with where plans say so.

A request with the option ``calibrate`` has a text's pages stored; a second one replays all of them from zero states, in
short pieces, and the worker takes the states after each (see `calibration` for who asks).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tailreplay.mean_states import EVERY, FIRST, RunningMean, begin_with
from tailreplay.plan import ReplayPlan
from tailreplay.provenance import Start

if TYPE_CHECKING:
    from tailreplay.engines.vllm.compat import StateBatch
    from tailreplay.engines.vllm.messages import Load


class MeanOrders:
    """The scheduler's side: which loads make a mean state, and whether every rank has one.

    Attributes
    ----------
    void : int
        Mean states with this tag or a lower one are of weights that may have changed.
    known : int
        Tag of the one that every rank has; 0 for none.
    """

    def __init__(self) -> None:
        self.void = self.known = self._tag = self._highest = 0

    def order(self, plan: ReplayPlan) -> int:
        """Return the tag of what the load of `plan` makes; 0 if it cannot make one: it must begin at the first token."""
        if plan.anchor is not None or plan.start is not Start.COMPLETE or not 0 < plan.replayed == plan.matched:
            return 0
        self._tag += 1
        return self._tag

    def heard(self, tag: int) -> bool:
        """Take the tag that all ranks have; returns whether it is a new one. Mutates self."""
        self.known = tag if tag > self.void else 0
        before, self._highest = self._highest, max(self._highest, self.known)
        return self.known > before

    def reset(self) -> None:
        """Let none that was ordered so far be used."""
        self.void, self.known = self._tag, 0


class MeanKeeper:
    """The worker's side: the mean state of this rank's layers, and those that are being made. On the device.

    Attributes
    ----------
    tag : int
        Of the load that made it; 0 while there is none.
    """

    def __init__(self, states: StateBatch) -> None:
        self._states = states
        self._making: dict[str, RunningMean] = {}
        self._void = 0
        self.tag = 0
        self.mean: list[torch.Tensor] = []

    def drop(self, void: int) -> None:
        """Let go of mean states with this tag or a lower one, those that are being made included."""
        self._void = void
        if self.tag <= void:
            self.tag, self.mean = 0, []

    def begin(self, load: Load) -> None:
        """Put the states in place that the tail begins with, those of its anchor being there. Mutates vLLM's cache.

        Raises
        ------
        LookupError
            If there is no mean state.
        """
        if load.start not in (Start.MEAN, Start.MIXED):
            return
        if not self.tag:
            raise LookupError("There is no mean state to begin with.")
        views = self._states.views(load.states)
        begin_with(views, self.mean, self._states.recurrent, mixed=load.start is Start.MIXED)

    def piece(self, load: Load, done: int, count: int) -> int:
        """Return how many of the next `count` tokens of a tail may be replayed at once."""
        return min(count, EVERY - done % EVERY) if load.calibrates else count

    def replayed(self, load: Load, done: int) -> None:
        """Take the states after the first `done` tokens of a load's tail if it makes a mean state."""
        if load.calibrates and done >= FIRST and (done % EVERY == 0 or done == load.tail):
            self._making.setdefault(load.request, RunningMean()).add(self._states.views(load.states))

    def ended(self, load: Load, failed: bool) -> None:
        """A load has ended, well or not: what it has made takes the place of what was there."""
        made = self._making.pop(load.request, None)
        if made is not None and not failed and load.calibrates > self._void:
            self.tag, self.mean = load.calibrates, made.result()
