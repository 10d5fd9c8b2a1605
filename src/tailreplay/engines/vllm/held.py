"""Hiddens of tokens that are not in a page yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tailreplay.engines.vllm.messages import Rows

# A request with at most so many tokens in a step shares its copy of the taps with the others: a copy each would be as many
# device operations as there are requests, in every step.
FEW = 16


class HeldHiddens:
    """Of one running request; mutated as it grows and as pages are stored.

    Parameters
    ----------
    start : int
        Position of the first token that will be added.
    """

    def __init__(self, start: int) -> None:
        self._start = start
        self._end = start
        self._chunks: list[torch.Tensor] = []

    def add(self, start: int, rows: torch.Tensor) -> None:
        """Append the hiddens of tokens from `start` on. They are kept as they are and must not change.

        Parameters
        ----------
        rows : torch.Tensor
            Shape ``(stored groups, tokens, width)``.

        Raises
        ------
        ValueError
            If they do not follow what is held.
        """
        if start != self._end:
            raise ValueError(f"hiddens of token {start} do not follow token {self._end - 1}")
        self._chunks.append(rows)
        self._end += rows.shape[1]

    def take(self, start: int, count: int) -> torch.Tensor:
        """Return hiddens ``start .. start+count-1``, ``(stored groups, count, width)``; let go of all before `start`.

        Raises
        ------
        ValueError
            If they are not held.
        """
        if not self._start <= start <= start + count <= self._end:
            raise ValueError(f"hiddens {start} to {start + count} asked for, {self._start} to {self._end} held")
        rows = self._chunks[0] if len(self._chunks) == 1 else torch.cat(self._chunks, dim=1)
        rows = rows[:, start - self._start :]
        self._chunks = [rows]
        self._start = start
        return rows[:, :count]

    def compact(self) -> None:
        """Let go of memory that a long chunk has left behind: what is held is a view into it. Call it once a step."""
        for index, rows in enumerate(self._chunks):
            # What several requests share goes when each of them has filled a page.
            if rows.shape[1] > FEW and rows.untyped_storage().nbytes() > 2 * rows.nbytes:
                self._chunks[index] = rows.clone()
        if sum(rows.shape[1] for rows in self._chunks) <= FEW:
            self._chunks = [rows.clone() for rows in self._chunks]


def step_rows(taps: Sequence[torch.Tensor], rows: Sequence[Rows], first: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Copy a step's hiddens out of the taps, which the next forward overwrites.

    Parameters
    ----------
    taps : sequence of torch.Tensor
        By stored group, ``(batch rows, width)``.
    rows : sequence of Rows
        Whose hiddens to copy.
    first : mapping
        Request -> its first row in the batch.

    Returns
    -------
    dict
        Request -> ``(stored groups, row.count, width)``. Requests with few tokens share one copy.
    """
    copies: dict[str, torch.Tensor] = {}
    few: list[Rows] = []
    for row in rows:
        if row.count <= FEW:
            few.append(row)
        else:
            at = first[row.request]
            copies[row.request] = _copied(taps, slice(at, at + row.count), row.count)
    copies.update(_together(taps, few, first))
    return copies


def _together(taps: Sequence[torch.Tensor], rows: Sequence[Rows], first: Mapping[str, int]) -> dict[str, torch.Tensor]:
    if not rows:
        return {}
    low = min(first[row.request] for row in rows)
    high = max(first[row.request] + row.count for row in rows)
    total = sum(row.count for row in rows)
    if high - low <= 2 * total:
        shared = _copied(taps, slice(low, high), high - low)
        starts = {row.request: first[row.request] - low for row in rows}
    else:
        # A long chunk of another request lies between them.
        index = [first[row.request] + offset for row in rows for offset in range(row.count)]
        shared = _copied(taps, index, total)
        starts, at = {}, 0
        for row in rows:
            starts[row.request] = at
            at += row.count
    return {row.request: shared[:, starts[row.request] : starts[row.request] + row.count] for row in rows}


def _copied(taps: Sequence[torch.Tensor], index: slice | list[int], count: int) -> torch.Tensor:
    if not taps:
        return torch.empty(0, count, 0)  # a stage that stores none follows its requests all the same
    return torch.stack([tap[index] for tap in taps])
