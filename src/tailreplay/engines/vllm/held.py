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
_CHUNKS = 64


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
        if len(self._chunks) >= _CHUNKS:
            # Copies that are shared with others live as long as the last of them needs its part.
            self._chunks = [torch.cat(self._chunks, dim=1)]
        self._chunks.append(rows)
        self._end += rows.shape[1]

    def take(self, start: int, count: int) -> torch.Tensor:
        """Return hiddens ``start .. start+count-1``, ``(stored groups, count, width)``: a view where they lie together.

        Raises
        ------
        ValueError
            If they are not held.
        """
        if not self._start <= start <= start + count <= self._end:
            raise ValueError(f"hiddens {start} to {start + count} asked for, {self._start} to {self._end} held")
        parts, at = [], self._start
        for rows in self._chunks:
            length = rows.shape[1]
            if at < start + count and start < at + length:
                parts.append(rows[:, max(start - at, 0) : start + count - at])
            at += length
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def release(self, start: int) -> None:
        """Let go of everything before `start`, and of the memory that it takes. Mutates self."""
        while self._chunks and self._start + self._chunks[0].shape[1] <= start:
            self._start += self._chunks.pop(0).shape[1]
        if self._start < start < self._end:
            # A clone, since a view would keep the whole chunk alive.
            self._chunks[0] = self._chunks[0][:, start - self._start :].clone()
            self._start = start


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
        shared = _copied(taps, _on_device(index, taps), total)
        starts, at = {}, 0
        for row in rows:
            starts[row.request] = at
            at += row.count
    return {row.request: shared[:, starts[row.request] : starts[row.request] + row.count] for row in rows}


def _copied(taps: Sequence[torch.Tensor], index: slice | torch.Tensor, count: int) -> torch.Tensor:
    if not taps:
        return torch.empty(0, count, 0)  # a stage that stores none follows its requests all the same
    if isinstance(index, slice):
        return torch.stack([tap[index] for tap in taps])
    return torch.stack([tap.index_select(0, index) for tap in taps])


def _on_device(index: list[int], taps: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return an index beside the taps, without waiting for the forward that writes them."""
    numbers = torch.tensor(index, device="cpu")
    device = taps[0].device if taps else numbers.device
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)
