"""What a trace will ask for: next uses of pages, a policy that knows them, and a bound on what any cache can hit."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tailreplay.bench.traces import Request
from tailreplay.keys import TOKEN_BYTES, page_key, token_bytes
from tailreplay.page import Page

NEVER = (1 << 31) - 1
PARTIAL, WHOLE, ASKED = range(3)


@dataclass(frozen=True)
class Future:
    """Every use of a page by a trace, in order: prompts and answers, page by page.

    Attributes
    ----------
    starts : sequence of int
        Index of each request's first use, then the number of all uses.
    pages : sequence of int
        Number of the page that is used.
    following : sequence of int
        Index of the next use of the same page, or `NEVER`. A partial page is used by whoever goes on from its tokens.
    kinds : sequence of int
        `PARTIAL`, or `WHOLE`, or `ASKED`: whole and in the prompt, so that it can be hit.
    """

    starts: Sequence[int]
    pages: Sequence[int]
    following: Sequence[int]
    kinds: Sequence[int]


def look_ahead(trace: Iterable[Request], page_size: int) -> Future:
    """Read a trace once. Takes some 200 bytes a page of it that differs from all others, and no tensors."""
    reader = _Reader(page_size * TOKEN_BYTES)
    for request in trace:
        reader.read(request)
    return Future(reader.starts, reader.pages, reader.following, reader.kinds)


class _Reader:
    def __init__(self, step: int) -> None:
        self._step = step
        self.starts, self.pages, self.following = array("q", [0]), array("i"), array("i")
        self.kinds = array("b")
        self._numbers: dict[bytes, int] = {}
        self._last = array("i")
        # Key of the page before -> partial pages after it: their ids, and where they were used last.
        self._partial: dict[bytes, dict[bytes, int]] = {}

    def read(self, request: Request) -> None:
        prompt = len(request.prompt) * TOKEN_BYTES
        ids = token_bytes(request.prompt) + token_bytes(request.output)
        key = b""
        for at in range(0, len(ids), self._step):
            part = ids[at : at + self._step]
            self._continue_partial(key, part)
            key = self._use(key, part)
            whole = ASKED if at + self._step <= prompt else WHOLE
            self.kinds.append(whole if len(part) == self._step else PARTIAL)
        self.starts.append(len(self.pages))

    def _use(self, parent: bytes, part: bytes) -> bytes:
        now = len(self.pages)
        key = page_key(parent, b"", part)
        number = self._numbers.setdefault(key, len(self._last))
        if number == len(self._last):
            self._last.append(now)
        elif self.following[self._last[number]] == NEVER:
            self.following[self._last[number]] = now
        self._last[number] = now
        self.pages.append(number)
        self.following.append(NEVER)
        if len(part) < self._step:
            self._partial.setdefault(parent, {})[part] = now
        return key

    def _continue_partial(self, parent: bytes, part: bytes) -> None:
        waiting = self._partial.get(parent)
        for ids in [ids for ids in waiting or () if part.startswith(ids) and part != ids]:
            assert waiting is not None
            self.following[waiting.pop(ids)] = len(self.pages)


class Clairvoyant:
    """Evicts the page whose next use is farthest away; of those that are never used again, the least recently used.

    A strong reference, not a bound. The tree does not hold it back, since whoever uses a page uses those before it first.
    But every page is stored, used again or not, and what two prompts share inside a page is not counted as a use.
    """

    name = "clairvoyant"

    def __init__(self, future: Future, page_size: int) -> None:
        self._future, self._page_size = future, page_size
        self._next: dict[bytes, int] = {}

    def sized(self, pages: int, page_size: int) -> None:
        pass

    def rank(self, page: Page) -> float:
        following = self._next.get(page.key, NEVER)
        return page.last_used - 1e15 if following == NEVER else -following

    def used(self, request: int, matched: Iterable[Page], stored: Iterable[Page]) -> None:
        """Take note of the pages that a request matched to their end, and of those it stored. Before they are unpinned."""
        first = self._future.starts[request]
        for page in matched:
            # A partial page has been gone on from: the longer one, stored now, is used from here on.
            whole = page.tokens == self._page_size
            self._note(page, self._future.following[first + page.start // self._page_size] if whole else NEVER)
        for page in stored:
            self._note(page, self._future.following[first + page.start // self._page_size])

    def _note(self, page: Page, following: int) -> None:
        if following == NEVER:
            self._next.pop(page.key, None)
        else:
            self._next[page.key] = following


def most_hits(future: Future, slots: int) -> int:
    """Return how many whole pages of prompts any cache of `slots` pages can hit at most.

    Belady's rule for pages that need not be in a tree and need not be stored: no schedule of loads and evictions does
    better, so a cache of pages in a tree does not either.
    """
    following, hits = future.following, 0
    resident: dict[int, int] = {}  # page -> its next use
    farthest: list[tuple[int, int]] = []
    for at, (page, kind) in enumerate(zip(future.pages, future.kinds, strict=True)):
        if kind == PARTIAL:
            continue
        hits += kind == ASKED and page in resident
        after = following[at]
        if after == NEVER:
            resident.pop(page, None)
            continue
        if page not in resident and len(resident) >= slots:
            while resident.get(farthest[0][1]) != -farthest[0][0]:
                heapq.heappop(farthest)
            if -farthest[0][0] <= after:
                continue
            del resident[heapq.heappop(farthest)[1]]
        resident[page] = after
        heapq.heappush(farthest, (-after, page))
    return hits


def token_bound(future: Future, slots: int, page_size: int, infinite: Sequence[int]) -> int:
    """Return how many tokens any cache of `slots` pages can hit at most.

    Parameters
    ----------
    infinite : sequence of int
        Tokens that each request hits in a cache without a limit.
    """
    # A match ends with part of a page at most.
    inside = int(np.minimum(np.asarray(infinite), page_size - 1).sum())
    return min(most_hits(future, slots) * page_size + inside, sum(infinite))
