"""Memory that codecs work in: some tokens at once, as float32, made once."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import torch

BLOCK = 128
"""Channels that share a scale."""

# Channels coded at once. On a CPU the two float32 copies of them stay in its caches while the cost of two dozen calls is
# small beside the work: half of it is slower, twice as much hardly faster. On other devices it only limits memory.
_AT_ONCE_CPU, _AT_ONCE = 1 << 18, 1 << 24
_MOST_ROOMS = 16


class Room:
    """Memory for the coding of some tokens of one shape.

    Its views are made once, since to make one takes as long as the work on thousands of channels.

    Parameters
    ----------
    memory : torch.Tensor
        Float32, at least ``2 * tokens * blocks * BLOCK``; may be shared with rooms that are not used at the same time.

    Attributes
    ----------
    channels, even : int
        Of a token; and with one more if that is odd.
    values, spare : torch.Tensor
        Float32 ``(tokens, blocks, BLOCK)``.
    spare_bits, short_ints : torch.Tensor
        Memory of `spare`: as int32; and as int16 ``(tokens, channels)``.
    flat, inner : torch.Tensor
        `values` as ``(tokens, channels)`` and ``(tokens, *shape)``, without what fills up the last block.
    peak_bits, peaks, scale : torch.Tensor
        ``(tokens, blocks)``: int32, the same memory as float32, float32.
    factors : torch.Tensor
        Memory of `scale` as ``(tokens, blocks, 1)``.
    stored, stored_bytes : torch.Tensor
        Float16 ``(tokens, blocks)``, and the same memory as uint8 ``(tokens, 2 * blocks)``.
    """

    def __init__(self, memory: torch.Tensor, tokens: int, shape: tuple[int, ...]) -> None:
        self.channels = math.prod(shape)
        self.even = self.channels + self.channels % 2
        blocks = blocks_of(self.channels)
        size = tokens * blocks * BLOCK
        self.values = memory[:size].view(tokens, blocks, BLOCK)
        self.flat = memory[:size].view(tokens, blocks * BLOCK)[:, : self.channels]
        self.inner = self.flat.view(tokens, *shape)
        self._fill = self.values[:, -1, self.channels % BLOCK :] if self.channels % BLOCK else None
        self.spare = memory[size : 2 * size].view(tokens, blocks, BLOCK)
        self.spare_bits = self.spare.view(torch.int32)
        ints = memory[size : 2 * size].view(torch.int16)
        self.short_ints = ints[: tokens * self.channels].view(tokens, self.channels)
        self.scale = torch.empty(tokens, blocks, dtype=torch.float32, device=memory.device)
        self.factors = self.scale[..., None]
        self.peaks = torch.empty_like(self.scale)
        self.peak_bits = self.peaks.view(torch.int32)
        self.stored = torch.empty_like(self.scale, dtype=torch.float16)
        self.stored_bytes = self.stored.view(torch.uint8)

    def enter(self) -> Room:
        """Prepare for the next tokens: a block that is not full takes part as a whole, filled up with zeros."""
        if self._fill is not None:
            self._fill.zero_()
        return self


def blocks_of(channels: int) -> int:
    """Return how many blocks a token has."""
    return -(-channels // BLOCK)


def rooms(rows: torch.Tensor) -> Iterator[tuple[int, int, Room]]:
    """Yield (first, last + 1, room) for some of `rows` at a time; each room is to be left before the next is taken."""
    shape = tuple(rows.shape[1:])
    at_once = _AT_ONCE_CPU if rows.device.type == "cpu" else _AT_ONCE
    step = max(1, at_once // (blocks_of(math.prod(shape)) * BLOCK))
    for begin in range(0, rows.shape[0], step):
        end = min(begin + step, rows.shape[0])
        yield begin, end, _room(end - begin, shape, rows.device).enter()


class _Kept(threading.local):
    """Memory and rooms on the CPU, one set a thread.

    The C library gives memory of this size back to the system each time, and to have it mapped anew takes as long as
    the coding of a page.
    """

    memory: torch.Tensor | None = None

    def __init__(self) -> None:
        self.rooms: dict[tuple[int, tuple[int, ...]], Room] = {}


_kept = _Kept()


def _room(tokens: int, shape: tuple[int, ...], device: torch.device) -> Room:
    size = 2 * tokens * blocks_of(math.prod(shape)) * BLOCK
    if device.type != "cpu" or size > 2 * _AT_ONCE_CPU:
        return Room(torch.empty(size, dtype=torch.float32, device=device), tokens, shape)
    room = _kept.rooms.get((tokens, shape))
    if room is not None:
        return room
    # What is made in inference mode could not be written to outside it.
    with torch.inference_mode(False):
        if _kept.memory is None:
            _kept.memory = torch.empty(2 * _AT_ONCE_CPU, dtype=torch.float32)
        if len(_kept.rooms) == _MOST_ROOMS:
            _kept.rooms.clear()
        room = _kept.rooms[tokens, shape] = Room(_kept.memory, tokens, shape)
    return room
