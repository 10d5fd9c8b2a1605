"""Storing pages: what a request computes goes to the catalog as it fills pages."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tailreplay.catalog import Catalog
from tailreplay.engines.vllm.lower import LowerSide
from tailreplay.engines.vllm.messages import Put
from tailreplay.engines.vllm.tracked import Tracked
from tailreplay.keys import token_bytes
from tailreplay.page import Page
from tailreplay.plan import ReplayPlan
from tailreplay.provenance import EXACT
from tailreplay.tiers.orders import Spill


class PageWriter:
    """Orders puts and follows them until the worker has confirmed them.

    Parameters
    ----------
    block_size : int
        Tokens of one of the engine's blocks.
    min_match : int
        A prompt's end that is shorter is not stored by itself.
    counts : Counter
        Refusals are counted here.
    lower : LowerSide or None
        Tiers below host memory, where pages are written, too.
    """

    def __init__(
        self,
        catalog: Catalog,
        block_size: int,
        min_match: int,
        counts: Counter[str],
        lower: LowerSide | None = None,
        lossy: bool = False,
    ) -> None:
        self._catalog = catalog
        self._block_size = block_size
        self._page_size = catalog.page_size
        self._min_match = min_match
        self._counts = counts
        self._lower = lower
        self._lossy = lossy
        self._puts: dict[int, _Entry] = {}
        # Tag of a spill -> the put that it goes with, until both have ended.
        self._spills: dict[int, _Entry] = {}
        self._tag = 0
        # Requests of which nothing more is stored, though they run: workers need not hold their hiddens.
        self._stopped: set[str] = set()

    def open(self, tracked: Tracked, plan: ReplayPlan | None) -> None:
        """Begin to store after the plan's last full page, or from the first token."""
        self.close(tracked)
        self._stopped.discard(tracked.request.request_id)
        tracked.computed = tracked.saved = plan.matched if plan is not None else 0
        if not tracked.options.store:
            return
        if plan is not None and len(plan.pages) * self._page_size < plan.matched:
            # The engine's own cache had more of the prefix than is stored: nothing can follow what is missing.
            self._counts["refused:gap"] += 1
            return
        if plan is not None and plan.matched % self._page_size and not plan.pages[-1].has_hidden:
            # A hit that begins with saved states and ends inside a page whose hiddens are gone: it cannot be filled.
            self._counts["refused:no_hiddens"] += 1
            return
        full = plan.matched // self._page_size if plan is not None else 0
        page = plan.pages[full - 1] if plan is not None and full else self._catalog.root(tracked.namespace)
        self._catalog.pin((page,))
        tracked.page, tracked.stored = page, full * self._page_size
        tracked.behind = plan.provenance if plan is not None else EXACT
        tracked.provenance = tracked.behind._replace(lossy=tracked.behind.lossy or self._lossy)
        tracked.ended_prefill = False

    def close(self, tracked: Tracked) -> None:
        """Store no more of a request. A second call does nothing."""
        if tracked.page is not None:
            self._catalog.unpin((tracked.page,))
            tracked.page = None

    def stop(self, tracked: Tracked) -> None:
        """Store no more of a request that goes on, and let workers forget what they hold of it."""
        self.close(tracked)
        self._stopped.add(tracked.request.request_id)

    def take_stopped(self) -> set[str]:
        """Return the requests that were stopped since the last call, but for those that have begun again."""
        stopped, self._stopped = self._stopped, set()
        return stopped

    def seal(self, tracked: Tracked, blocks: list[int], puts: list[Put]) -> None:
        """Order puts for the pages that this step fills, as far as their token ids are known."""
        known = min(tracked.computed, tracked.request.num_tokens)
        size = self._page_size
        while tracked.page is not None and tracked.stored + size <= known:
            self._put(tracked, blocks, size, puts)
        ends_prefill = tracked.computed >= tracked.request.num_prompt_tokens and not tracked.ended_prefill
        if ends_prefill and tracked.page is not None:
            tracked.ended_prefill = True
            # Let others have the prompt's end at once, not only when this answer has ended.
            if tracked.request.num_prompt_tokens - tracked.stored >= self._min_match:
                self.put_rest(tracked, blocks, puts)

    def put_rest(self, tracked: Tracked, blocks: list[int], puts: list[Put]) -> None:
        """Order a put for the tokens after the last full page; the chain stays where it is."""
        count = min(tracked.computed, tracked.request.num_tokens) - tracked.stored
        if tracked.page is not None and count > 0:
            self._put(tracked, blocks, count, puts)

    def _put(self, tracked: Tracked, blocks: list[int], count: int, puts: list[Put]) -> None:
        start = tracked.stored
        ids = token_bytes(list(tracked.request.all_token_ids[start : start + count]))
        assert tracked.page is not None
        admission = self._catalog.admit(tracked.page, tracked.namespace, ids, tracked.provenance)
        whole = count == self._page_size
        if admission.page is None:
            self._counts[f"refused:{admission.reason}"] += 1
            if whole:
                self.stop(tracked)
            return
        fill = admission.fill
        if fill is not None:
            self._tag += 1
            entry = self._puts[self._tag] = _Entry(tracked, fill, admission.page)
            tracked.puts += 1
            size = self._block_size
            covering = tuple(blocks[start // size : -(-(start + count) // size)])
            name = tracked.request.request_id
            spill = self._spill_with(entry)
            puts.append(Put(self._tag, name, fill.slot, covering, start, count, fill.hidden_slot, spill))
        if whole:
            # One pin for the put in flight (given by admit), one for the chain.
            if fill is not None:
                self._catalog.pin((admission.page,))
            self._catalog.unpin((tracked.page,))
            tracked.page, tracked.stored = admission.page, start + count
        elif fill is None:
            self._catalog.unpin((admission.page,))

    def stored(self, tag: int) -> Tracked | None:
        """Let a page that the worker has be matched; returns its request if no other page of it is on its way."""
        entry = self._puts.pop(tag, None)
        if entry is None:
            return None
        self._catalog.commit(entry.fill)
        if entry.spill is None:
            # Its bytes may be better than those that were there, or too many others waited to be written.
            if self._lower is not None and not entry.written and entry.page.slot == entry.slot:
                self._lower.spill(entry.page, entry.tracked.namespace)
            self._catalog.unpin((entry.page,))
        entry.landed = True
        return self._landed(entry.tracked)

    def failed(self, tag: int) -> Tracked | None:
        """Give up a page that could not be stored, and all that were to follow it; returns as `stored` does."""
        first = self._puts.get(tag)
        if first is None:
            return None
        tracked = first.tracked
        self._counts["refused:failed"] += 1
        self.stop(tracked)
        landed = None
        for later in sorted((t for t, e in self._puts.items() if e.tracked is tracked and t >= tag), reverse=True):
            entry = self._puts.pop(later)
            if entry.spill is None:
                self._catalog.abort(entry.fill)
            else:
                entry.given_up = True  # its slots are being read: nobody else may have them before that has ended
            landed = self._landed(tracked)
        return landed

    def spilled(self, tag: int, page: Page) -> None:
        """A page has been written to the tiers below, or has not: its slots are free of that."""
        entry = self._spills.pop(tag, None)
        if entry is None:
            self._catalog.unpin((page,))
        elif entry.given_up:
            self._catalog.abort(entry.fill)
        elif entry.landed:
            self._catalog.unpin((page,))
        else:
            # The put itself is still on its way.
            entry.spill, entry.written = None, True

    def _spill_with(self, entry: _Entry) -> Spill | None:
        """Order that a new page be written to the tiers below as soon as it is stored."""
        if self._lower is None or not entry.is_new:
            return None
        order = self._lower.spill_with(entry.page, entry.tracked.namespace)
        if order is not None:
            entry.spill = order.tag
            self._spills[order.tag] = entry
        return order

    @staticmethod
    def _landed(tracked: Tracked) -> Tracked | None:
        tracked.puts -= 1
        return None if tracked.puts else tracked


@dataclass
class _Entry:
    """A put on its way.

    Attributes
    ----------
    fill, page : Page
        See `tailreplay.decisions.Admission`.
    spill : int or None
        Tag of the order to write it to the tiers below, while that has not ended.
    landed, given_up, written : bool
        What became of the put, and of the order to write it.
    """

    tracked: Tracked
    fill: Page
    page: Page
    spill: int | None = None
    landed: bool = False
    given_up: bool = False
    written: bool = False
    slot: int = -1

    def __post_init__(self) -> None:
        self.slot = self.fill.slot

    @property
    def is_new(self) -> bool:
        """Whether the page was not there before."""
        return self.fill is self.page
