"""Hiddens on their way to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from tailreplay.pages import PageLayout

Read = tuple[int, int, int]
"""Stored group, first token, last token + 1."""


class Reader(Protocol):
    """Reads cached hiddens, as `tailreplay.views.PagesView` does."""

    def hidden(self, group: int, start: int, stop: int, out: torch.Tensor) -> None: ...


class Staging:
    """Reads hiddens of a plan; those that replay needs first are read at once.

    Keys and values would hold them up on their way to a GPU: make this before copying those.

    Parameters
    ----------
    reads : sequence of Read
        What to read at once. Each is handed out once and kept no longer.
    """

    def __init__(self, reader: Reader, layout: PageLayout, device: torch.device, reads: Sequence[Read]) -> None:
        self._reader = reader
        self._layout = layout
        self._device = device
        self._staged = {read: self._read(read) for read in reads}

    def hidden(self, group: int, start: int, stop: int) -> torch.Tensor:
        """Return hiddens ``start .. stop-1`` of a stored group, ``(1, stop - start, d_model)``."""
        staged = self._staged.pop((group, start, stop), None)
        return (self._read((group, start, stop)) if staged is None else staged)[None]

    def into(self, group: int, start: int, stop: int, out: torch.Tensor) -> None:
        """Copy the same to `out`, ``(stop - start, d_model)``. Mutates `out`."""
        staged = self._staged.pop((group, start, stop), None)
        if staged is None:
            self._reader.hidden(group, start, stop, out)
        else:
            out.copy_(staged)

    def _read(self, read: Read) -> torch.Tensor:
        group, start, stop = read
        part = self._layout.hidden[group]
        out = torch.empty((stop - start, *part.shape), dtype=part.dtype, device=self._device)
        self._reader.hidden(group, start, stop, out)
        return out
