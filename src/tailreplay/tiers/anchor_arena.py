"""Bytes of saved states, in host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tailreplay.pages import PageLayout, PartSpec
from tailreplay.tiers.host import HostArena


class AnchorArena:
    """States of `slots` anchors, allocated once and never grown.

    Parameters
    ----------
    parts : sequence of PartSpec
        One tensor of an anchor each, in its engine's own shape.
    slots : int
        Number of anchors.
    pin : bool
        Use page-locked memory, for asynchronous copies to a CUDA device.

    Raises
    ------
    CacheConfigError
        If the memory cannot be had.
    """

    def __init__(self, parts: Sequence[PartSpec], slots: int, pin: bool = False) -> None:
        self.parts = tuple(parts)
        # An anchor is a page of one "token". Larger elements first, so that each region is aligned for its own.
        by_size = sorted(self.parts, key=lambda part: -part.dtype.itemsize)
        self._arena = HostArena(PageLayout(1, (tuple(by_size),), ()), slots, pin=pin and slots > 0)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self._arena.nbytes

    def write(self, slot: int, states: Sequence[torch.Tensor]) -> None:
        """Copy states into a slot and note their checksums. Mutates the arena.

        Parameters
        ----------
        states : sequence of torch.Tensor
            One of ``part.shape`` for each part, on any device.

        Raises
        ------
        ValueError
            If one has another shape or dtype than the part, or a codec cannot hold it.
        """
        for part, state in zip(self.parts, states, strict=True):
            rows = state[None]
            part.check(rows, 1)
            self._arena.write(part, [slot], rows)
            self._arena.seal(part, slot, 1)

    def read(self, slot: int, states: Sequence[torch.Tensor]) -> None:
        """Copy a slot into `states`, as `write` takes them. Mutates `states`; asynchronous on a CUDA device."""
        for part, state in zip(self.parts, states, strict=True):
            self._arena.read(part, [slot], 0, 1, state[None])

    def is_damaged(self, slot: int) -> bool:
        """Whether a slot does not hold, byte by byte, what was written."""
        return self._arena.is_damaged(self.parts, slot)
