"""Whose hiddens go first: those far from the end of a sequence that nobody has read."""

from __future__ import annotations

from tailreplay.catalog import Catalog
from tailreplay.keys import Namespace, token_bytes
from tailreplay.page import Page
from tailreplay.provenance import EXACT
from tailreplay.room import NEAR_TOKENS

PAGE, KV, HIDDEN = 16, 60, 40
NAMESPACE = Namespace("model", "layout", PAGE)
NEAR = NEAR_TOKENS // PAGE  # pages
LONG = NEAR + 4


def make(pages: int, hiddens: int) -> Catalog:
    limit = pages * KV + hiddens * HIDDEN
    catalog = Catalog(PAGE, limit, KV + HIDDEN, hidden_bytes=HIDDEN, hidden_share=hiddens / pages)
    assert (catalog.slots, catalog.hidden_slots) == (pages, hiddens)
    return catalog


def store(catalog: Catalog, value: int, pages: int, later: range = range(0)) -> list[Page]:
    """Store a sequence; the pages `later` get room for hiddens only after they are admitted."""
    at = catalog.root(NAMESPACE)
    catalog.pin((at,))
    stored = []
    for index in range(pages):
        ids = token_bytes([value] * PAGE)
        admission = catalog.admit(at, NAMESPACE, ids, EXACT, hidden=index not in later)
        assert admission.page is not None
        if admission.fill is not None:
            if index in later:
                catalog.add_hidden(admission.fill)
            catalog.commit(admission.fill)
        catalog.unpin((at,))
        at = admission.page
        stored.append(at)
    catalog.unpin((at,))
    return stored


def with_hiddens(pages: list[Page]) -> list[int]:
    return [index for index, page in enumerate(pages) if page.has_hidden]


def test_the_beginning_of_a_new_sequence_goes_before_the_end_of_an_old_one() -> None:
    catalog = make(100, LONG)
    old = store(catalog, 1, LONG)
    assert with_hiddens(old) == list(range(LONG))
    store(catalog, 2, 4)
    assert with_hiddens(old) == list(range(4, LONG))
    new = store(catalog, 3, LONG)
    # Once what is near an end is all that is left, the oldest goes.
    assert with_hiddens(new)[-NEAR:] == list(range(LONG))[-NEAR:]
    assert len(with_hiddens(old)) < NEAR


def test_hiddens_that_were_read_stay_wherever_they_are() -> None:
    catalog = make(100, LONG)
    old = store(catalog, 1, LONG)
    catalog.pin(old[:2], PAGE)  # reads those of the second page only
    catalog.unpin(old[:2])
    store(catalog, 1, LONG + 3)
    assert with_hiddens(old)[:2] == [1, 4]  # three were needed


def test_hiddens_that_were_missed_or_asked_for_stay_too() -> None:
    catalog = make(100, LONG)
    old = store(catalog, 1, LONG, later=range(1, 2))
    store(catalog, 2, 3)
    assert with_hiddens(old)[:2] == [1, 4]
    catalog = make(100, LONG)
    old = store(catalog, 1, LONG)
    store(catalog, 2, 1)
    assert with_hiddens(old)[:2] == [1, 2]
    store(catalog, 1, 1)  # somebody computed those of the first page again, for want of them
    assert old[0].hidden_read
    store(catalog, 3, 2)
    assert with_hiddens(old)[:2] == [0, 4]


def test_where_every_page_has_room_for_hiddens_none_loses_them_alone() -> None:
    catalog = make(LONG, LONG)
    for value in range(5):
        assert all(page.has_hidden for page in store(catalog, value, LONG))
    assert catalog.stripped == 0
