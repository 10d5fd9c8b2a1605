"""Events of a catalog: what a router hears."""

from __future__ import annotations

from tailreplay.catalog import Catalog
from tailreplay.events import PageEvents, PageRemoved, PageStored
from tailreplay.keys import token_bytes
from tailreplay.page import Page
from tailreplay.provenance import EXACT, Provenance
from tests.core.catalog_model import NAMESPACES, PAGE_BYTES, PAGE_SIZE

NAMESPACE = NAMESPACES[1]
FIRST, SECOND = token_bytes([1] * PAGE_SIZE), token_bytes([2] * 5)


def make(slots: int = 4) -> tuple[Catalog, PageEvents, Page]:
    """A catalog, its events, and a pinned root."""
    events = PageEvents()
    catalog = Catalog(PAGE_SIZE, slots * PAGE_BYTES, PAGE_BYTES, events)
    root = catalog.root(NAMESPACE)
    catalog.pin((root,))
    return catalog, events, root


def store(catalog: Catalog, parent: Page, ids: bytes, provenance: Provenance = EXACT) -> Page:
    admission = catalog.admit(parent, NAMESPACE, ids, provenance)
    assert admission.page is not None
    assert admission.fill is not None
    catalog.commit(admission.fill)
    return admission.page


def test_a_page_is_an_event_once_it_can_be_matched() -> None:
    catalog, events, root = make()
    first = catalog.admit(root, NAMESPACE, FIRST, EXACT).fill
    assert first is not None
    assert events.take() == []
    catalog.commit(first)
    last = store(catalog, first, SECOND)
    assert events.take() == [
        PageStored(first.key, None, FIRST, NAMESPACE),
        PageStored(last.key, first.key, SECOND, NAMESPACE),
    ]
    assert events.take() == []
    catalog.unpin((last, first, root))
    catalog.clear()
    assert events.take() == [PageRemoved(last.key), PageRemoved(first.key)]


def test_what_comes_and_goes_unseen_is_no_event() -> None:
    catalog, events, root = make()
    catalog.unpin((store(catalog, root, FIRST),))
    catalog.clear()
    assert len(events) == 0
    page = store(catalog, root, FIRST)
    events.take()
    catalog.unpin((page,))
    catalog.clear()
    assert len(events) == 1
    assert store(catalog, root, FIRST).key == page.key
    assert events.take() == []


def test_a_page_that_was_given_up_or_only_got_better_is_no_event() -> None:
    catalog, events, root = make()
    fill = catalog.admit(root, NAMESPACE, FIRST, EXACT).fill
    assert fill is not None
    catalog.abort(fill)
    assert events.take() == []
    page = store(catalog, root, FIRST, Provenance(1))
    catalog.unpin((page,))
    events.take()
    better = catalog.admit(root, NAMESPACE, FIRST, EXACT).fill
    assert better is not None
    catalog.commit(better)
    assert page.provenance == EXACT
    assert events.take() == []


def test_a_partial_page_goes_when_a_longer_one_comes() -> None:
    catalog, events, root = make()
    short = store(catalog, root, FIRST[:20])
    catalog.unpin((short,))
    events.take()
    page = store(catalog, root, FIRST)
    assert events.take() == [PageRemoved(short.key), PageStored(page.key, None, FIRST, NAMESPACE)]
