"""How much linear layers forget, from the gates of cached tokens: what a replay's state error is predicted from.

A head's state follows ``S_i = T_i S_{i-1} + write_i`` with ``||T_i|| <= alpha_i``, the token's gate. Two states that see
the same tokens differ after them by at most ``exp(L)`` of what they differed by before, where L is the sum of log alpha.

**Theorem.** For the first linear layer of a group, whose inputs in the tail are exact, each head's error after the tail is
at most ``exp(L) * ||S0 - S||``: S is its true state where the tail begins, S0 the one that the replay has there. Mamba-2
has equality, its T being the number alpha. With KDA, alpha is the largest of a token's channels. A convolution of width K
reads K - 1 tokens that a tail lacks, so with one all this holds from K - 1 tokens after the tail's begin.

**Calibrated.** Pages do not know the states' norms where a tail begins: `drift` bounds ``||S0 - S||`` by the norm where the
tail ends. Deeper layers read what the layers before them wrote while their states were still wrong. The tail is split into
segments; in each, the inputs are taken to be wrong by `gain` times the errors of the layers before at its begin, and the
part of the state that is written there by as much. That a relative error of the one is at most `gain` times that of the
other is measured (`tailreplay.engines.transformers.calibration`), not proven. Gates that follow from wrong inputs are
taken for the true ones. Where layers have experts, a wrong input may go to another one: a jump that no gain bounds, though
it is seldom.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailreplay.page import Page
from tailreplay.topology import Topology

Floats = NDArray[np.floating]
_GROWTH = 1.2
"""A segment begins at most so many times as far from the end as the next."""


@dataclass(frozen=True)
class Calibration:
    """What of the prediction is measured and not proven; see `tailreplay.forgetting`.

    Attributes
    ----------
    drift : float
        Greatest norm of a state that a tail lacks, over the norm where the tail ends.
    gain : float or tuple of float
        Relative error of what a layer writes, over the relative state errors of the layers before it in the group: of all
        layers with a state, or of each (that of a group's first one means nothing).
    floor : float
        Least error of deeper layers, whatever the tail: once their inputs differ at all, they are rounded otherwise. The
        epsilon of the model's dtype; bfloat16's if not given.
    """

    drift: float = 1.5
    gain: float | tuple[float, ...] = 1.0
    floor: float = 2.0**-7


DEFAULT = Calibration()


@dataclass(frozen=True)
class Forgetting:
    """What the last tokens of a match forget, as far as their pages know.

    Attributes
    ----------
    starts : tuple of int
        Where each segment begins, in ascending order; each ends where the next begins.
    end : int
        Length m of the match, where the last segment ends.
    decay : ndarray, shape (segments, layers, heads)
        Sums of log alpha, at most 0. Layers are those with a state, in the order of the topology's groups.
    shares : ndarray, shape (layers, heads)
        Each head's share of its layer's squared state norm.
    """

    starts: tuple[int, ...]
    end: int
    decay: Floats
    shares: Floats

    @property
    def tails(self) -> NDArray[np.int64]:
        """Lengths of the tails that begin where a segment begins, shape (segments,)."""
        return self.end - np.asarray(self.starts, dtype=np.int64)


def forgetting_of(pages: Sequence[Page], end: int, longest: int) -> Forgetting | None:
    """Return what the pages with gates before `end` forget; None if the last page there has none.

    Parameters
    ----------
    pages : sequence of Page
        Of a match, from token 0 on.
    longest : int
        No tail longer than that is asked about.
    """
    known: list[Page] = []
    for page in reversed(pages):
        if page.start >= end:
            continue
        if page.gates is None or (known and known[-1].start <= end - longest):
            break
        known.append(page)
    if not known:
        return None
    known.reverse()
    sums = np.stack([page.gates[0] for page in known if page.gates is not None]).astype(np.float32)
    if known[-1].start + known[-1].tokens > end:
        sums[-1] = 0.0  # only used in part, and how much of it that part forgets is not known
    latest = known[-1].gates
    assert latest is not None
    return segmented([page.start for page in known], end, sums, latest[1].astype(np.float32))


def segmented(starts: Sequence[int], end: int, sums: Floats, shares: Floats) -> Forgetting:
    """Join neighbouring pages to segments: few of them do for any length.

    Parameters
    ----------
    starts : sequence of int
        Where each page begins, in ascending order; the last one ends at `end`.
    sums : ndarray, shape (pages, layers, heads)
        Of log alpha.
    shares : ndarray, shape (layers, heads)
    """
    count = len(starts)
    borders = [0]  # pages from the end
    while borders[-1] < count:
        borders.append(min(max(borders[-1] + 1, int(borders[-1] * _GROWTH)), count))
    first = [count - border for border in reversed(borders[1:])]
    return Forgetting(tuple(starts[page] for page in first), end, np.add.reduceat(sums, first, axis=0), shares)


def tail_errors(forgetting: Forgetting, topology: Topology, calibration: Calibration) -> Floats:
    """Predict the state error of every tail that begins with a segment.

    Returns
    -------
    ndarray, shape (segments, layers)
        ``||S^ - S|| / ||S||`` of each layer with a state; 0 for a tail that is the whole prefix.
    """
    positions = [position for group in topology.groups for position, _ in enumerate(group.stateful)]
    groups = [index for index, group in enumerate(topology.groups) for _ in group.stateful]
    count, layers, _ = forgetting.decay.shape
    assert layers == len(positions), "gates of another model"
    bounds = np.asarray([*forgetting.starts, forgetting.end], dtype=np.float64)
    even = np.diff(bounds) / forgetting.end
    errors = np.zeros((count, layers))
    inputs = np.zeros((count, count, len(topology.groups)))
    gain = np.broadcast_to(np.asarray(calibration.gain, dtype=np.float64), (layers,))
    for position in range(max(positions, default=-1) + 1):
        rows = [row for row, at in enumerate(positions) if at == position]
        columns = [groups[row] for row in rows]
        shares, kept = forgetting.shares[rows], np.exp(forgetting.decay[:, rows])
        # What is forgotten is written anew; a head that forgets nothing has written as much at each token.
        written = np.maximum(1 - kept, even[:, None, None]) * gain[rows][:, None]
        error = np.full((count, *shares.shape), calibration.drift, dtype=np.float64)
        before = inputs[:, :, columns].copy()
        for segment in range(count):
            some = error[: segment + 1]  # the tails that have begun
            inputs[segment, : segment + 1, columns] += np.sqrt((shares * some**2).sum(-1)).T
            some *= kept[segment]
            some += written[segment] * before[segment, : segment + 1, :, None]
        errors[:, rows] = np.maximum(np.sqrt((shares * error**2).sum(-1)), calibration.floor if position else 0.0)
    if forgetting.starts[0] == 0:
        errors[0] = 0.0
    return errors


def slow_heads(horizons: Floats, tail: int, left: float = math.exp(-1)) -> NDArray[np.bool_]:
    """Return which heads hardly forget: those that keep more than a share `left` of their state over a tail.

    Parameters
    ----------
    horizons : ndarray, shape (layers, heads)
        Tokens until a head keeps 1/e.

    Returns
    -------
    ndarray of bool, shape (layers, heads)
    """
    return np.asarray(np.exp(-tail / horizons) > left)
