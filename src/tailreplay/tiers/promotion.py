"""Bringing pages up: what lower tiers hold of a prompt gets room in host memory, is fetched, and can be matched."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from tailreplay.catalog import Catalog
from tailreplay.decisions import Admission, Match
from tailreplay.keys import TOKEN_BYTES, Namespace, common_tokens
from tailreplay.modes import Reuse
from tailreplay.page import Page
from tailreplay.page_format import decode_gates
from tailreplay.provenance import Provenance, Terms
from tailreplay.tiers.base import HIDDEN, KV
from tailreplay.tiers.finder import FoundPage
from tailreplay.tiers.naming import record_of
from tailreplay.tiers.orders import Fetch
from tailreplay.topology import Topology


class Search:
    """What to ask the lower tiers for one prompt, from what the catalog holds of it.

    Attributes
    ----------
    start : int
        Position from which on pages are looked for.
    parent : bytes
        Key of the page before it.
    lacking : list of PageRecord
        Pages in host memory that have lost their hiddens, near enough to the end that a replay may need them.
    """

    def __init__(self, match: Match, namespace: Namespace, page_size: int, reuse: Reuse, topology: Topology) -> None:
        whole = [page for page in match.pages if page.tokens == page_size and page.start + page_size <= match.tokens]
        self.start = len(whole) * page_size
        self.parent = whole[-1].key if whole else namespace.digest
        first = tail_start(self.start, reuse, topology)
        self.lacking = [
            record_of(page, namespace)
            for page in match.pages
            if not page.has_hidden and page.start + page.tokens > first and topology.stored_groups
        ]


def tail_start(tokens: int, reuse: Reuse, topology: Topology) -> int:
    """Return the position of the first token whose hiddens a hit of `tokens` tokens needs."""
    if reuse.budget is None:
        return tokens
    return tokens - max(
        (reuse.budget.tail(tokens, group) for group in topology.groups if group.stores_hidden), default=0
    )


class Promotion:
    """Pages on their way up: admitted to the catalog, not there yet. All calls under the catalog's lock.

    Parameters
    ----------
    ids : bytes
        Prompt.
    limit : int
        Longest useful match.
    lacking : sequence of FoundPage
        Resident pages whose hiddens are to be brought.
    found : sequence of FoundPage
        Pages after the last whole one that is resident, in order.
    lossy : bool
        Whether host memory holds pages in a lossy codec: what comes up is not exact there, whatever it was below.

    Attributes
    ----------
    orders : list of Fetch
        For the mover. `end` each of them, whatever comes of it.
    """

    def __init__(
        self,
        catalog: Catalog,
        namespace: Namespace,
        ids: bytes,
        limit: int,
        reuse: Reuse,
        topology: Topology,
        lacking: Sequence[FoundPage],
        found: Sequence[FoundPage],
        first_tag: int = 0,
        lossy: bool = False,
    ) -> None:
        self._catalog = catalog
        self._namespace = namespace
        self.orders: list[Fetch] = []
        self._tag = first_tag
        self._at_best = Provenance(0, lossy)
        # The hiddens of resident pages come one by one; pages that follow one another stand or fall by those before.
        self._runs: list[list[tuple[Admission, int | None]]] = []
        self._good: dict[int, bool] = {}
        # What the request cannot use would push out what it can; for exact mode, lossy hiddens would spoil exact pages.
        found = list(takewhile(lambda page: self._fits(page, reuse.terms), found))
        lacking = [page for page in lacking if self._fits(page, reuse.terms)]
        run = self._admit_run(found) if found else []
        end = limit
        if run:
            last = found[len(run) - 1].record
            end = min(limit, last.start + common_tokens(last.ids, ids[last.start * TOKEN_BYTES :]))
        # How far there is room for pages says which of them need their hiddens.
        tail = tail_start(end, reuse, topology)
        self._order_run(run, found, tail)
        for page in lacking:
            if HIDDEN in page.sources and page.record.start + page.record.tokens > tail:
                self._order_hidden(page)

    @property
    def pending(self) -> int:
        """Orders that have not ended."""
        return len(self.orders) - len(self._good)

    def end(self, tag: int, good: bool) -> bool:
        """Note that an order has ended. True if it was the last: then call `finish`."""
        self._good[tag] = good
        return not self.pending

    def finish(self) -> int:
        """Let what came be matched, and give up the rest. Returns how many pages came."""
        assert not self.pending
        came = 0
        for run in self._runs:
            good = 0
            while good < len(run) and self._is_good(run[good][1]):
                good += 1
            for admission, tag in reversed(run[good:]):
                self._give_up(admission, tag)
            for admission, tag in run[:good]:
                if tag is not None:
                    assert admission.fill is not None
                    self._catalog.commit(admission.fill)
                    came += 1
            for admission, _ in run[:good]:
                assert admission.page is not None
                self._catalog.unpin((admission.page,))
        self._runs = []
        return came

    # ---- inside

    def _fits(self, page: FoundPage, terms: Terms) -> bool:
        return terms.take(page.record.provenance.worst(self._at_best))

    def _is_good(self, tag: int | None) -> bool:
        return tag is None or self._good[tag]

    def _give_up(self, admission: Admission, tag: int | None) -> None:
        if tag is not None:
            assert admission.fill is not None
            self._catalog.abort(admission.fill)
        else:
            assert admission.page is not None
            self._catalog.unpin((admission.page,))

    def _admit_run(self, pages: Sequence[FoundPage]) -> list[Admission]:
        """Admit pages that follow one another, as far as there is room; the first one's parent is resident."""
        after = parent = self._catalog.find(pages[0].record.parent, self._namespace)
        if parent is None or after is None:
            return []
        run: list[Admission] = []
        self._catalog.pin((parent,))
        for page in pages:
            record = page.record
            provenance = record.provenance.worst(self._at_best)
            admission = self._catalog.admit(after, self._namespace, record.ids, provenance, hidden=False)
            if admission.page is None:
                break
            run.append(admission)
            after = admission.page
        self._catalog.unpin((parent,))
        return run

    def _order_run(self, run: Sequence[Admission], pages: Sequence[FoundPage], tail: int) -> None:
        steps: list[tuple[Admission, int | None]] = []
        for admission, page in zip(run, pages, strict=False):
            fill = admission.fill
            if fill is not None and HIDDEN in page.sources and page.record.start + page.record.tokens > tail:
                self._catalog.add_hidden(fill)
            steps.append((admission, self._order(fill, page) if fill is not None else None))
        if steps:
            self._runs.append(steps)

    def _order_hidden(self, page: FoundPage) -> None:
        """Order the hiddens of a page that is resident without them."""
        record = page.record
        parent = self._catalog.find(record.parent, self._namespace)
        resident = self._catalog.find(record.key, self._namespace)
        if parent is None or resident is None:
            return
        self._catalog.pin((parent,))
        # Never better than what is there, so that the keys and values are left alone.
        provenance = record.provenance.worst(resident.provenance).worst(self._at_best)
        admission = self._catalog.admit(parent, self._namespace, record.ids, provenance, hidden=True)
        self._catalog.unpin((parent,))
        if admission.page is not None:
            tag = self._order(admission.fill, page) if admission.fill is not None else None
            self._runs.append([(admission, tag)])

    def _order(self, fill: Page, page: FoundPage) -> int:
        """Order what `fill` waits for."""
        slots = []
        if fill.slot >= 0:
            slots.append((KV, fill.slot, page.sources[KV], page.nbytes[KV]))
            fill.gates = decode_gates(page.record.gates)
        if fill.has_hidden:
            slots.append((HIDDEN, fill.hidden_slot, page.sources[HIDDEN], page.nbytes[HIDDEN]))
        self._tag += 1
        self.orders.append(Fetch(self._tag, page.record, tuple(slots)))
        return self._tag
