"""Host-memory tier: one preallocated arena of page slots."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from xxhash import xxh3_64_intdigest

from tailreplay.errors import CacheConfigError
from tailreplay.pages import PageLayout, PartSpec
from tailreplay.sizes import format_bytes


class HostArena:
    """Bytes of `slots` pages, allocated once and never grown.

    The arena is one block of memory, cut into one region a part; a region holds that part of every slot. So a run of
    neighbouring slots is one contiguous copy, and a part can be read without touching the others.

    Parameters
    ----------
    layout : PageLayout
        Parts of a page.
    slots : int
        Number of pages.
    pin : bool
        Use page-locked memory, for asynchronous copies to a CUDA device.

    Raises
    ------
    CacheConfigError
        If the memory cannot be had.
    """

    def __init__(self, layout: PageLayout, slots: int, pin: bool = False) -> None:
        self.layout = layout
        self.slots = slots
        try:
            block = torch.empty(slots * layout.page_bytes, dtype=torch.uint8)
            if pin:
                _page_lock(block)
        except RuntimeError as error:
            raise CacheConfigError(
                f"{format_bytes(slots * layout.page_bytes)} of host memory cannot be had for the cache: lower its size."
            ) from error
        self._block = block
        # (slot, part) -> how many tokens were sealed, and their checksum.
        self._sums: dict[tuple[int, str], tuple[int, int]] = {}
        self._regions: dict[str, torch.Tensor] = {}
        at = 0
        for part in layout.parts:
            # Pages are multiples of 16 tokens, so every region starts aligned for its dtype.
            size = slots * layout.page_size * part.token_bytes
            region = block[at : at + size].view(part.dtype)
            self._regions[part.name] = region.view(slots * layout.page_size, *part.shape)
            at += size

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.layout.page_bytes

    def write(self, part: PartSpec, slots: Sequence[int], tokens: torch.Tensor) -> None:
        """Copy `tokens` into the pages at `slots`. Mutates the arena.

        Parameters
        ----------
        slots : sequence of int
            Pages to fill, in token order.
        tokens : torch.Tensor
            Shape ``(n, *part.shape)`` with ``n <= len(slots) * page_size``, on any device. The last page may be partial.
        """
        region = self._regions[part.name]
        for at, start, count in self._runs(slots, 0, tokens.shape[0]):
            region[start : start + count].copy_(tokens[at : at + count])

    def read(self, part: PartSpec, slots: Sequence[int], start: int, stop: int, out: torch.Tensor) -> None:
        """Copy tokens ``start .. stop-1`` of the sequence stored at `slots` into `out`. Mutates `out` only.

        Parameters
        ----------
        out : torch.Tensor
            Shape ``(stop - start, *part.shape)``. On a CUDA device the copies are asynchronous on the current stream.
        """
        region = self._regions[part.name]
        for at, origin, count in self._runs(slots, start, stop):
            out[at : at + count].copy_(region[origin : origin + count], non_blocking=True)

    def seal(self, part: PartSpec, slot: int, tokens: int) -> None:
        """Note a checksum of the first `tokens` tokens of `part` in the page at `slot`, for `damaged`."""
        self._sums[slot, part.name] = tokens, self._sum(part, slot, tokens)

    def damaged(self, part: PartSpec, slots: Sequence[int]) -> list[int]:
        """Return those of `slots` where `part` is not, byte by byte, what was sealed."""
        wrong = []
        for slot in slots:
            tokens, expected = self._sums.get((slot, part.name), (0, None))
            if expected is None or self._sum(part, slot, tokens) != expected:
                wrong.append(slot)
        return wrong

    def _sum(self, part: PartSpec, slot: int, tokens: int) -> int:
        start = slot * self.layout.page_size
        rows = self._regions[part.name][start : start + tokens]
        data: Any = rows.view(torch.uint8).numpy()
        return xxh3_64_intdigest(data)

    def _runs(self, slots: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (offset from `start`, first row in the region, rows), with neighbouring slots joined."""
        size = self.layout.page_size
        at = start
        while at < stop:
            first = page = at // size
            while page + 1 < len(slots) and (page + 1) * size < stop and slots[page + 1] == slots[page] + 1:
                page += 1
            end = min(stop, (page + 1) * size)
            yield at - start, slots[first] * size + at % size, end - at
            at = end


def _page_lock(block: torch.Tensor) -> None:
    """Lock exactly this memory: torch's own pinned allocator rounds up to a power of two, up to twice the limit."""
    cuda: Any = torch.cuda.cudart()
    torch.cuda.check_error(cuda.cudaHostRegister(block.data_ptr(), block.numel(), 0))
    weakref.finalize(block, cuda.cudaHostUnregister, block.data_ptr())
