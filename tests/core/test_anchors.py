"""Anchors: which states are kept, who finds them, who goes first."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tailreplay import Provenance
from tailreplay.anchor import Anchor
from tailreplay.anchors import Anchors
from tailreplay.catalog import Catalog
from tailreplay.keys import Namespace, token_bytes
from tailreplay.page import Page
from tailreplay.provenance import ANY, EXACT, Start
from tailreplay.quotas import Shares

PAGE = 16
NAMESPACE = Namespace("model", "layout", PAGE)
CARRIED = Provenance(1, start=Start.CARRIED)
Tokens = tuple[int, ...]


def make_catalog(slots: int = 8, anchors: int = 4) -> Catalog:
    return Catalog(PAGE, slots, 1, anchors=Anchors(anchors))


def store(catalog: Catalog, tokens: Tokens, provenance: Provenance = EXACT) -> None:
    """Store a sequence as an engine does, and let go of it."""
    page = catalog.root(NAMESPACE)
    catalog.pin((page,))
    for at in range(0, len(tokens), PAGE):
        admission = catalog.admit(page, NAMESPACE, token_bytes(tokens[at : at + PAGE]), provenance)
        if admission.page is None:
            break
        if admission.fill is not None:
            catalog.commit(admission.fill)
        catalog.unpin((page,))
        page = admission.page
    catalog.unpin((page,))


def offer(catalog: Catalog, tokens: Tokens, provenance: Provenance = EXACT) -> Anchor | None:
    """Offer the states after `tokens`, whose full pages must be there; pins nothing but the anchor."""
    parent = catalog.root(NAMESPACE)
    full = len(tokens) // PAGE * PAGE
    if full:
        match = catalog.match(token_bytes(tokens[:full]), NAMESPACE, limit=full)
        if match.tokens < full:
            return None
        parent = match.pages[-1]
    catalog.pin((parent,))
    anchor = catalog.anchors.offer(parent, token_bytes(tokens[full:]), provenance)
    catalog.unpin((parent,))
    return anchor


def save(catalog: Catalog, tokens: Tokens, provenance: Provenance = EXACT) -> Anchor:
    anchor = offer(catalog, tokens, provenance)
    assert anchor is not None
    catalog.anchors.commit(anchor)
    return anchor


def found(catalog: Catalog, tokens: Tokens, limit: int | None = None) -> list[int]:
    match = catalog.match(token_bytes(tokens), NAMESPACE, limit=len(tokens) if limit is None else limit)
    return [anchor.position for anchor in match.anchors]


ONE = tuple(range(40))


def test_states_are_found_by_whoever_shares_the_tokens_before_them() -> None:
    catalog = make_catalog()
    store(catalog, ONE)
    for position in (5, 16, 20, 40):
        save(catalog, ONE[:position])
    assert found(catalog, ONE) == [5, 16, 20, 40]
    assert found(catalog, ONE, limit=39) == [5, 16, 20]
    assert found(catalog, (*ONE[:21], 99, 98)) == [5, 16, 20]
    assert found(catalog, (*ONE[:18], 99, 98)) == [5, 16]
    assert found(catalog, (99, *ONE)) == []


def test_states_saved_by_one_branch_serve_the_other() -> None:
    catalog = make_catalog()
    other = (*ONE[:22], *range(100, 110))
    store(catalog, ONE)
    store(catalog, other)
    save(catalog, ONE[:20])
    # Its tokens are in pages of both; the match ends in the other's.
    assert found(catalog, (*other[:30], 7)) == [20]
    save(catalog, other[:24])
    assert found(catalog, ONE) == [20]


def test_an_unfinished_anchor_is_not_found_and_a_failed_one_leaves_nothing() -> None:
    catalog = make_catalog()
    store(catalog, ONE)
    anchor = offer(catalog, ONE[:20])
    assert anchor is not None
    assert found(catalog, ONE) == []
    assert offer(catalog, ONE[:20]) is None, "somebody is writing it"
    catalog.anchors.abort(anchor)
    assert (found(catalog, ONE), catalog.anchors.used) == ([], 0)
    assert offer(catalog, ONE[:20]) is not None


def test_no_anchor_at_a_sequence_s_beginning_or_without_room() -> None:
    catalog = make_catalog(anchors=0)
    store(catalog, ONE)
    assert offer(catalog, ONE[:20]) is None
    assert offer(make_catalog(), ()) is None


def test_better_states_take_the_place_of_worse_ones_and_no_others() -> None:
    catalog = make_catalog()
    store(catalog, ONE)
    save(catalog, ONE[:20], CARRIED)
    assert offer(catalog, ONE[:20], Provenance(1, start=Start.ZERO)) is None
    assert offer(catalog, ONE[:20], CARRIED) is None
    assert save(catalog, ONE[:20]).provenance == EXACT
    assert catalog.anchors.used == 1
    assert offer(catalog, ONE[:20]) is None


def test_an_anchor_goes_with_the_last_page_that_leads_to_it() -> None:
    catalog = make_catalog()
    other = (*ONE[:22], *range(100, 110))
    store(catalog, ONE)
    store(catalog, other)
    save(catalog, ONE[:20])
    save(catalog, ONE[:36])
    catalog.clear()
    assert (catalog.pages, catalog.anchors.used) == (0, 0)


def test_states_that_are_being_written_or_read_keep_their_slot_when_their_page_goes() -> None:
    catalog = make_catalog()
    store(catalog, ONE)
    written = offer(catalog, ONE[:36])
    read = save(catalog, ONE[:40])
    assert written is not None
    catalog.anchors.pin(read)
    catalog.clear()
    assert catalog.anchors.used == 2
    slots = {written.slot, read.slot}
    store(catalog, ONE)
    assert save(catalog, ONE[:20]).slot not in slots
    catalog.anchors.commit(written)
    catalog.anchors.unpin(read)
    assert found(catalog, ONE) == [20]
    assert catalog.anchors.used == 1


def test_damaged_states_are_not_found_again() -> None:
    catalog = make_catalog()
    store(catalog, ONE)
    anchor = save(catalog, ONE[:20])
    catalog.anchors.pin(anchor)
    catalog.anchors.drop(anchor)
    assert found(catalog, ONE) == []
    assert catalog.anchors.used == 1, "somebody reads it"
    catalog.anchors.unpin(anchor)
    assert catalog.anchors.used == 0


def test_what_saves_least_replay_goes_first_and_use_renews() -> None:
    catalog = make_catalog(anchors=2)
    store(catalog, ONE)
    save(catalog, ONE[:30])
    save(catalog, ONE[:32])
    save(catalog, ONE[:16])
    assert found(catalog, ONE) == [16, 30], "it saved two tokens beside the one at 30"
    catalog = make_catalog(anchors=2)
    store(catalog, ONE)
    old = save(catalog, ONE[:10])
    save(catalog, ONE[:20])
    catalog.anchors.pin(old)
    catalog.anchors.unpin(old)
    for position in (31, 40):
        save(catalog, ONE[:position])
    assert 40 in found(catalog, ONE)
    assert catalog.anchors.evicted == 2


def test_pinned_anchors_are_not_evicted() -> None:
    catalog = make_catalog(anchors=1)
    store(catalog, ONE)
    anchor = save(catalog, ONE[:20])
    catalog.anchors.pin(anchor)
    assert offer(catalog, ONE[:30]) is None
    catalog.anchors.unpin(anchor)
    assert offer(catalog, ONE[:30]) is not None


def test_a_tenant_keeps_to_its_share_of_anchors() -> None:
    tenant = NAMESPACE.tenant
    anchors = Anchors(4, Shares({}, {tenant: 1}))
    catalog = Catalog(PAGE, 8, 1, anchors=anchors)
    store(catalog, ONE)
    save(catalog, ONE[:20])
    save(catalog, ONE[:30])
    assert (found(catalog, ONE), anchors.used) == ([30], 1)


# ---- in any order

sequences = st.lists(
    st.tuples(st.sampled_from([0, 0, 1, 2]), st.sampled_from([1, 7, 15, 16, 17])), min_size=1, max_size=4
).map(lambda pieces: tuple(value for value, count in pieces for _ in range(count)))
provenances = st.sampled_from([EXACT, EXACT, CARRIED, Provenance(2, start=Start.ZERO)])


class AnchorMachine(RuleBasedStateMachine):
    """Stores, saves, reads and evicts; what a match finds is what a list of all anchors says."""

    @initialize(slots=st.sampled_from([2, 4, 9]), anchors=st.sampled_from([1, 2, 5]))
    def start(self, slots: int, anchors: int) -> None:
        self.catalog = make_catalog(slots, anchors)
        self.saved: list[tuple[Tokens, Anchor]] = []
        self.writing: list[tuple[Tokens, Anchor]] = []
        self.reading: list[tuple[tuple[Page, ...], Anchor | None]] = []

    @rule(tokens=sequences, provenance=provenances)
    def store(self, tokens: Tokens, provenance: Provenance) -> None:
        store(self.catalog, tokens, provenance)

    @rule(tokens=sequences, provenance=provenances)
    def offer(self, tokens: Tokens, provenance: Provenance) -> None:
        anchor = offer(self.catalog, tokens, provenance)
        if anchor is not None:
            assert anchor.position == len(tokens)
            self.writing.append((tokens, anchor))

    @rule(good=st.booleans())
    def end_writing(self, good: bool) -> None:
        if self.writing:
            tokens, anchor = self.writing.pop(0)
            if good:
                self.catalog.anchors.commit(anchor)
                self.saved.append((tokens, anchor))
            else:
                self.catalog.anchors.abort(anchor)

    @rule(tokens=sequences, limit=st.integers(0, 70))
    def look_up(self, tokens: Tokens, limit: int) -> None:
        match = self.catalog.match(token_bytes(tokens), NAMESPACE, limit=min(limit, len(tokens)), terms=ANY)
        expected = [
            anchor
            for known, anchor in self.saved
            if anchor.listed and len(known) <= match.tokens and tokens[: len(known)] == known
        ]
        assert list(match.anchors) == sorted(expected, key=lambda anchor: anchor.position)
        anchor = match.anchors[-1] if match.anchors else None
        self.catalog.pin(match.pages)
        self.catalog.anchors.pin(anchor)
        self.reading.append((match.pages, anchor))

    @rule(damaged=st.booleans())
    def end_reading(self, damaged: bool) -> None:
        if self.reading:
            pages, anchor = self.reading.pop(0)
            if damaged and anchor is not None:
                self.catalog.anchors.drop(anchor)
            self.catalog.anchors.unpin(anchor)
            self.catalog.unpin(pages)

    @rule()
    def clear(self) -> None:
        self.catalog.clear()

    @invariant()
    def slots_belong_to_one_each(self) -> None:
        if not hasattr(self, "catalog"):
            return
        alive = {id(anchor): anchor for _, anchor in [*self.saved, *self.writing] if anchor.slot >= 0}
        slots = [anchor.slot for anchor in alive.values()]
        assert len(set(slots)) == len(slots) == self.catalog.anchors.used <= self.catalog.anchors.slots

    @invariant()
    def what_is_kept_can_be_reached(self) -> None:
        if hasattr(self, "catalog"):
            for tokens, anchor in self.saved:
                if anchor.listed and anchor.parent.parent is not None:
                    assert anchor.parent.slot >= 0, tokens


AnchorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_anchors_in_any_order = AnchorMachine.TestCase


def test_the_machine_finds_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Anchors, "page_gone", lambda *_: None)
    with pytest.raises(AssertionError):
        test_an_anchor_goes_with_the_last_page_that_leads_to_it()
