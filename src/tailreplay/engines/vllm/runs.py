"""Pages that are stored together: each part of a run goes in one gather and few copies, however many pages it has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tailreplay.engines.vllm.messages import Put


@dataclass(frozen=True)
class Run:
    """Pages of one request, one after the other; all but the last are full.

    Attributes
    ----------
    puts : tuple of Put
        At least one. Several all have room for keys, values and hiddens.
    blocks : tuple of int
        Attention blocks that hold their keys and values, from the one of token `start` on.
    """

    puts: tuple[Put, ...]
    blocks: tuple[int, ...]

    @property
    def request(self) -> str:
        """Whose pages they are."""
        return self.puts[0].request

    @property
    def start(self) -> int:
        """Position of their first token."""
        return self.puts[0].start

    @property
    def count(self) -> int:
        """Tokens of all of them."""
        return sum(put.count for put in self.puts)

    @property
    def slots(self) -> tuple[int, ...]:
        """Where the keys and values of each page go; -1 if they are there already."""
        return tuple(put.slot for put in self.puts)

    @property
    def hidden_slots(self) -> tuple[int, ...]:
        """Where the hiddens of each page go; -1 if they go nowhere."""
        return tuple(put.hidden_slot for put in self.puts)

    def singly(self, block_size: int) -> Iterator[Run]:
        """Yield each page as a run of its own."""
        for put in self.puts:
            yield run_of([put], block_size)


def run_of(puts: Sequence[Put], block_size: int) -> Run:
    """Return puts of one request that follow each other as one run."""
    blocks: tuple[int, ...] = ()
    for put in puts:
        # Where a page begins inside a block, the page before has named that block.
        shared = bool(blocks) and put.start % block_size > 0
        blocks += put.blocks[1:] if shared else put.blocks
    return Run(tuple(puts), blocks)


def runs(puts: Sequence[Put], page_size: int, block_size: int) -> Iterator[Run]:
    """Join puts that follow each other, in their order."""
    joined: list[Put] = []
    for put in puts:
        if joined and not _follows(joined[-1], put, page_size):
            yield run_of(joined, block_size)
            joined = []
        joined.append(put)
    if joined:
        yield run_of(joined, block_size)


def _follows(before: Put, put: Put, page_size: int) -> bool:
    whole = min(before.slot, before.hidden_slot, put.slot, put.hidden_slot) >= 0
    next_to = put.request == before.request and put.start == before.start + before.count
    return whole and next_to and before.count == page_size
