"""Host-memory tier: one preallocated arena with slots for keys and values, and for hiddens."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from xxhash import xxh3_64_intdigest

from tailreplay.codecs import codec_of
from tailreplay.errors import CacheConfigError
from tailreplay.pages import PageLayout, PartSpec
from tailreplay.sizes import format_bytes

_SMALL = 1 << 20  # bytes; larger copies may be worth several threads


class HostArena:
    """Bytes of `slots` pages, allocated once and never grown.

    The arena is one block of memory, cut into one region a part; a region holds that part of every slot. So a run of
    neighbouring slots is one contiguous copy, and a part can be read without touching the others.

    Parameters
    ----------
    layout : PageLayout
        Parts of a page, and in which codec to hold them.
    slots : int
        Number of slots for keys and values.
    hidden_slots : int, optional
        Number of slots for hiddens; as many if not given.
    pin : bool
        Use page-locked memory, for asynchronous copies to a CUDA device.

    Raises
    ------
    CacheConfigError
        If the memory cannot be had.
    """

    def __init__(self, layout: PageLayout, slots: int, hidden_slots: int | None = None, pin: bool = False) -> None:
        self.layout = layout
        self.slots = slots
        self.hidden_slots = slots if hidden_slots is None else hidden_slots
        self._hidden = {part.name for part in layout.hidden}
        try:
            block = torch.empty(self.nbytes, dtype=torch.uint8)
            if pin:
                _page_lock(block)
        except RuntimeError as error:
            raise CacheConfigError(
                f"{format_bytes(self.nbytes)} of host memory cannot be had for the cache: lower its size."
            ) from error
        self._block = block
        # (slot, part) -> how many tokens were sealed, and their checksum.
        self._sums: dict[tuple[int, str], tuple[int, int]] = {}
        # Rows of bytes, one a token.
        self._regions: dict[str, torch.Tensor] = {}
        at = 0
        for part in layout.parts:
            # Pages are multiples of 16 tokens, so every region starts aligned for its dtype.
            rows = self._slots_of(part) * layout.page_size
            region = block[at : at + rows * part.token_bytes]
            self._regions[part.name] = region.view(rows, part.token_bytes)
            at += region.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        hidden = self.layout.hidden_bytes
        return self.slots * (self.layout.page_bytes - hidden) + self.hidden_slots * hidden

    def write(self, part: PartSpec, slots: Sequence[int], tokens: torch.Tensor) -> None:
        """Copy `tokens` into the pages at `slots`. Mutates the arena.

        Parameters
        ----------
        slots : sequence of int
            Where that part of each page goes, in token order.
        tokens : torch.Tensor
            Shape ``(n, *part.shape)`` with ``n <= len(slots) * page_size``, on any device. The last page may be partial.

        Raises
        ------
        ValueError
            If the part's codec cannot hold the numbers.
        """
        for at, start, count in self._runs(slots, 0, tokens.shape[0]):
            rows = self._regions[part.name][start : start + count]
            if part.codec == "none":
                rows.view(part.dtype).view(count, *part.shape).copy_(tokens[at : at + count])
            elif tokens.is_cpu:
                codec_of(part.codec).encode(tokens[at : at + count], rows)
            else:
                coded = torch.empty_like(rows, device=tokens.device)
                codec_of(part.codec).encode(tokens[at : at + count], coded)
                rows.copy_(coded)

    def read(self, part: PartSpec, slots: Sequence[int], start: int, stop: int, out: torch.Tensor) -> None:
        """Copy tokens ``start .. stop-1`` of the sequence stored at `slots` into `out`. Mutates `out` only.

        Parameters
        ----------
        out : torch.Tensor
            Shape ``(stop - start, *part.shape)``. On a CUDA device the copies are asynchronous on the current stream.
        """
        plain = _bytes(out) if part.codec == "none" and out.is_cpu and out.is_contiguous() else None
        for at, origin, count in self._runs(slots, start, stop):
            rows = self._regions[part.name][origin : origin + count]
            if plain is not None and rows.numel() < _SMALL:
                # Pages that lie apart are many small copies: torch takes longer to begin one than to make it.
                plain[at : at + count] = rows.numpy()
            elif part.codec == "none":
                out[at : at + count].copy_(rows.view(part.dtype).view(count, *part.shape), non_blocking=True)
            else:
                # Coded bytes are fewer: they travel, and are decoded where they are needed.
                codec_of(part.codec).decode(rows.to(out.device, non_blocking=True), out[at : at + count])

    def rows(self, part: PartSpec, slot: int, tokens: int) -> torch.Tensor:
        """Return the first `tokens` tokens of `part` at `slot`, ``(tokens, part.token_bytes)`` uint8: a view."""
        start = slot * self.layout.page_size
        return self._regions[part.name][start : start + tokens]

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

    def is_damaged(self, parts: Sequence[PartSpec], slot: int) -> bool:
        """Whether any of `parts` at `slot` is not what was sealed."""
        return any(self.damaged(part, (slot,)) for part in parts)

    def _sum(self, part: PartSpec, slot: int, tokens: int) -> int:
        data: Any = self.rows(part, slot, tokens).numpy()
        return xxh3_64_intdigest(data)

    def _slots_of(self, part: PartSpec) -> int:
        return self.hidden_slots if part.name in self._hidden else self.slots

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


def _bytes(tokens: torch.Tensor) -> Any:
    """Return a numpy view of contiguous tokens, bytes by token."""
    return tokens.view(tokens.shape[0], math.prod(tokens.shape[1:])).view(torch.uint8).numpy()


def _page_lock(block: torch.Tensor) -> None:
    """Lock exactly this memory: torch's own pinned allocator rounds up to a power of two, up to twice the limit."""
    cuda: Any = torch.cuda.cudart()
    torch.cuda.check_error(cuda.cudaHostRegister(block.data_ptr(), block.numel(), 0))
    weakref.finalize(block, cuda.cudaHostUnregister, block.data_ptr())
