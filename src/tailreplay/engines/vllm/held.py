"""Hiddens of tokens that are not in a page yet."""

from __future__ import annotations

import torch


class HeldHiddens:
    """Of one running request, by stored group; mutated as it grows and as pages are stored.

    Parameters
    ----------
    groups : int
        Number of stored groups.
    start : int
        Position of the first token that will be added.
    """

    def __init__(self, groups: int, start: int) -> None:
        self._start = start
        self._end = start
        self._chunks: list[list[torch.Tensor]] = [[] for _ in range(groups)]

    def add(self, start: int, count: int, rows: list[torch.Tensor]) -> None:
        """Append copies of the hiddens of `count` tokens from `start` on, shape ``(count, d_model)`` for each group.

        Raises
        ------
        ValueError
            If they do not follow what is held.
        """
        if start != self._end:
            raise ValueError(f"hiddens of token {start} do not follow token {self._end - 1}")
        for chunks, new in zip(self._chunks, rows, strict=True):
            chunks.append(new.clone())
        self._end += count

    def take(self, start: int, count: int) -> list[torch.Tensor]:
        """Return hiddens ``start .. start+count-1`` of each group, and let go of everything before `start`.

        Raises
        ------
        ValueError
            If they are not held.
        """
        if self._chunks and not self._start <= start <= start + count <= self._end:
            raise ValueError(f"hiddens {start} to {start + count} asked for, {self._start} to {self._end} held")
        taken = []
        for index, chunks in enumerate(self._chunks):
            rows = chunks[0] if len(chunks) == 1 else torch.cat(chunks)
            rows = rows[start - self._start :]
            self._chunks[index] = [rows]
            taken.append(rows[:count])
        self._start = start
        return taken

    def compact(self) -> None:
        """Let go of memory that a long chunk has left behind: what is held is a view into it. Call it once a step."""
        for chunks in self._chunks:
            for index, rows in enumerate(chunks):
                if rows.untyped_storage().nbytes() > 2 * rows.nbytes:
                    chunks[index] = rows.clone()
