"""Keys and values of one attention layer, in and out of vLLM's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from tailreplay.errors import CacheConfigError
from tailreplay.pages import PartSpec
from tailreplay.tiers.host import HostArena

_STAGED_TOKENS = 8192


class KVBlocks(Protocol):
    """How the cache of a layer is cut into pages.

    Attributes
    ----------
    part : PartSpec
        What is stored of a token.
    """

    part: PartSpec

    def store(self, blocks: Sequence[int], start: int, count: int, arena: HostArena, slots: Sequence[int]) -> None:
        """Copy tokens ``start .. start+count-1`` into the pages at `slots`. Mutates the arena.

        Parameters
        ----------
        blocks : sequence of int
            From the block of token `start` on.
        """

    def fill(self, blocks: Sequence[int], start: int, stop: int, arena: HostArena, slots: Sequence[int]) -> None:
        """Copy tokens ``start .. stop-1`` of the sequence stored at `slots` into its blocks. Mutates the cache.

        Parameters
        ----------
        blocks : sequence of int
            From the sequence's first token on; blocks before that of `start` are not touched.
        """


class OpaqueBlocks:
    """A layout that only the kernels understand: whole blocks are copied, a page is a block.

    What lies past the last token is copied too; it is never attended before it is written.

    Parameters
    ----------
    cache : torch.Tensor
        The layer's cache; its first dimension counts blocks, or equal parts of blocks.
    blocks : int
        Number of blocks.
    """

    def __init__(self, name: str, cache: torch.Tensor, blocks: int, block_size: int) -> None:
        parts = cache.shape[0] // blocks
        self._cache = cache if parts == 1 else cache.view(blocks, parts, *cache.shape[1:])
        self._size = block_size
        self.part = PartSpec(name, (self._cache[0].numel() // block_size,), cache.dtype, whole=True)

    def store(self, blocks: Sequence[int], start: int, count: int, arena: HostArena, slots: Sequence[int]) -> None:
        for block, slot in zip(blocks, slots, strict=True):
            arena.write(self.part, [slot], self._cache[block].view(self._size, *self.part.shape))

    def fill(self, blocks: Sequence[int], start: int, stop: int, arena: HostArena, slots: Sequence[int]) -> None:
        for page in range(start // self._size, -(-stop // self._size)):
            target = self._cache[blocks[page]].view(self._size, *self.part.shape)
            arena.read(self.part, [slots[page]], 0, self._size, target)


class TokenBlocks:
    """A layout that keeps tokens apart: any run of tokens can be gathered and scattered.

    Parameters
    ----------
    cache : torch.Tensor
        ``(blocks, heads, tokens, content)`` or, without heads, ``(blocks, tokens, content)``; kernels may cut a block of
        vLLM's into several of their own, which then count here.

    Raises
    ------
    CacheConfigError
        If the cache has another shape.
    """

    def __init__(self, name: str, cache: torch.Tensor, blocks: int, block_size: int) -> None:
        tokens = cache.movedim(2, 1) if cache.dim() == 4 else cache
        if tokens.dim() not in (3, 4) or tokens.shape[0] * tokens.shape[1] != blocks * block_size:
            raise CacheConfigError(f"tailreplay does not know the shape of vLLM's cache, {tuple(cache.shape)}.")
        self._cache = tokens
        self._size = block_size
        self._parts = tokens.shape[0] // blocks
        self._part_size = tokens.shape[1]
        self.part = PartSpec(name, tuple(self._cache.shape[2:]), cache.dtype)

    def store(self, blocks: Sequence[int], start: int, count: int, arena: HostArena, slots: Sequence[int]) -> None:
        arena.write(self.part, slots, self._cache[self._places(blocks, start, count, start // self._size)])

    def fill(self, blocks: Sequence[int], start: int, stop: int, arena: HostArena, slots: Sequence[int]) -> None:
        for at in range(start, stop, _STAGED_TOKENS):
            count = min(stop - at, _STAGED_TOKENS)
            staged = torch.empty((count, *self.part.shape), dtype=self.part.dtype, device=self._cache.device)
            arena.read(self.part, slots, at, at + count, staged)
            self._cache[self._places(blocks, at, count, 0)] = staged

    def _places(self, blocks: Sequence[int], start: int, count: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (block, offset) of each token; `blocks` begins with the sequence's block number `first`."""
        positions = torch.arange(start, start + count)
        block = torch.tensor(blocks)[positions // self._size - first]
        offset = positions % self._size
        block = block * self._parts + offset // self._part_size
        device = self._cache.device
        return block.to(device), (offset % self._part_size).to(device)
