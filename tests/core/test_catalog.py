"""Catalog: moments that a random walk seldom meets."""

from __future__ import annotations

import pytest

from tailreplay import CacheConfigError, Provenance
from tailreplay.catalog import Catalog
from tailreplay.decisions import Admission, Match
from tailreplay.keys import token_bytes
from tailreplay.page import Page
from tailreplay.provenance import ANY, EXACT, ONLY_EXACT
from tests.core.catalog_model import NAMESPACES, PAGE_BYTES, PAGE_SIZE

NAMESPACE = NAMESPACES[0]
APPROXIMATE = Provenance(1)
FIRST, SECOND = [1] * PAGE_SIZE, [2] * PAGE_SIZE


def make_catalog(slots: int = 4) -> Catalog:
    return Catalog(PAGE_SIZE, slots * PAGE_BYTES, PAGE_BYTES)


def pinned_root(catalog: Catalog) -> Page:
    root = catalog.root(NAMESPACE)
    catalog.pin((root,))
    return root


def admit(catalog: Catalog, parent: Page, tokens: list[int], provenance: Provenance = EXACT) -> Admission:
    return catalog.admit(parent, NAMESPACE, token_bytes(tokens), provenance)


def store(catalog: Catalog, parent: Page, tokens: list[int], provenance: Provenance = EXACT) -> Page:
    """Admit and commit a page; it stays pinned."""
    admission = admit(catalog, parent, tokens, provenance)
    assert admission.page is not None
    assert admission.fill is not None
    catalog.commit(admission.fill)
    return admission.page


def find(catalog: Catalog, tokens: list[int], exact_only: bool = False) -> Match:
    return catalog.match(token_bytes(tokens), NAMESPACE, limit=len(tokens), terms=ONLY_EXACT if exact_only else ANY)


@pytest.fixture
def rewriting() -> tuple[Catalog, Page, Page]:
    """A catalog where an approximate page (returned, pinned by the writer) is just being rewritten exactly."""
    catalog = make_catalog()
    root = pinned_root(catalog)
    page = store(catalog, root, FIRST, APPROXIMATE)
    catalog.unpin((page,))
    admission = admit(catalog, root, FIRST)
    assert admission.page is page
    assert admission.fill is not None
    assert admission.fill is not page
    return catalog, page, admission.fill


def test_better_bytes_take_the_place_of_worse_ones(rewriting: tuple[Catalog, Page, Page]) -> None:
    catalog, page, fill = rewriting
    old = page.slot
    assert find(catalog, FIRST).pages == (page,), "the old bytes serve until the new ones are complete"
    catalog.commit(fill)
    assert (page.provenance, page.slot) == (EXACT, fill.slot)
    assert find(catalog, FIRST, exact_only=True).tokens == PAGE_SIZE
    assert catalog.bytes_used == PAGE_BYTES
    root = page.parent
    assert root is not None
    assert store(catalog, root, SECOND).slot == old, "the old slot is free"


def test_bytes_that_somebody_reads_stay_in_place(rewriting: tuple[Catalog, Page, Page]) -> None:
    catalog, page, fill = rewriting
    old = page.slot
    reader = find(catalog, FIRST)
    catalog.pin(reader.pages)
    catalog.commit(fill)
    assert (page.provenance, page.slot) == (APPROXIMATE, old)
    assert find(catalog, FIRST, exact_only=True).stop == "approximate"
    assert catalog.bytes_used == PAGE_BYTES, "the better copy is given up"
    catalog.unpin(reader.pages)
    catalog.unpin((page,))
    catalog.clear()
    assert catalog.pages == 0


def test_only_one_writer_rewrites_a_page(rewriting: tuple[Catalog, Page, Page]) -> None:
    catalog, page, fill = rewriting
    root = page.parent
    assert root is not None
    assert admit(catalog, root, FIRST) == Admission(page)
    catalog.unpin((page,))
    catalog.abort(fill)
    assert (page.provenance, page.pins) == (APPROXIMATE, 0)
    assert catalog.bytes_used == PAGE_BYTES


def test_a_page_that_is_being_written_is_not_matched_and_not_written_twice() -> None:
    catalog = make_catalog()
    root = pinned_root(catalog)
    first = admit(catalog, root, FIRST)
    assert first.page is not None
    assert admit(catalog, root, FIRST) == Admission(None, reason="busy")
    below = admit(catalog, first.page, SECOND)
    assert below.fill is not None
    assert find(catalog, FIRST) == Match(0, (), "unseen")
    catalog.commit(first.page)
    assert find(catalog, FIRST + SECOND) == Match(PAGE_SIZE, (first.page,), "unseen")
    catalog.commit(below.fill)
    assert find(catalog, FIRST + SECOND).tokens == 2 * PAGE_SIZE


def test_a_better_copy_needs_room_but_its_absence_is_no_failure() -> None:
    catalog = make_catalog(slots=1)
    root = pinned_root(catalog)
    page = store(catalog, root, FIRST, APPROXIMATE)
    catalog.unpin((page,))
    assert admit(catalog, root, FIRST) == Admission(page), "the only slot is the page's own"
    assert admit(catalog, root, SECOND) == Admission(None, reason="full")
    catalog.unpin((page,))
    assert admit(catalog, root, SECOND).page is not None


@pytest.mark.parametrize(
    ("prompt", "exact_only", "stop"),
    [
        ([1] * 5 + [9], False, "unseen"),  # the partial page ends here
        ([1] * 3 + [9], False, "diverged"),
        ([9, 9], False, "diverged"),
        ([1] * 5, False, "end"),
        ([3] * 4 + [9], False, "diverged"),
        ([3] * 4 + [9], True, "approximate"),
        ([9, 9], True, "diverged"),
    ],
)
def test_a_match_says_why_it_is_no_longer(prompt: list[int], exact_only: bool, stop: str) -> None:
    catalog = make_catalog()
    root = pinned_root(catalog)
    store(catalog, root, [1] * 5)
    store(catalog, root, [3] * 8, APPROXIMATE)
    assert find(catalog, prompt, exact_only).stop == stop


def test_exact_pages_win_a_tie() -> None:
    catalog = make_catalog()
    root = pinned_root(catalog)
    store(catalog, root, [1] * 5 + [2], APPROXIMATE)
    exact = store(catalog, root, [1] * 5 + [3])
    assert find(catalog, [1] * 5 + [4]).pages == (exact,)


def test_a_namespace_is_forgotten_with_its_last_page() -> None:
    catalog = make_catalog()
    root = pinned_root(catalog)
    page = store(catalog, root, FIRST)
    catalog.unpin((page, root))
    assert catalog.namespaces == 1
    catalog.clear()
    assert catalog.namespaces == 0
    fill = admit(catalog, pinned_root(catalog), FIRST).fill
    assert fill is not None
    assert fill.parent is not None
    catalog.unpin((fill.parent,))
    catalog.abort(fill)
    assert (catalog.namespaces, catalog.pages, catalog.bytes_used) == (0, 0, 0)


def test_a_limit_below_one_page_is_refused() -> None:
    with pytest.raises(CacheConfigError, match="smaller than one page of 16 tokens"):
        Catalog(PAGE_SIZE, PAGE_BYTES - 1, PAGE_BYTES)


def test_misuse_is_caught() -> None:
    catalog = make_catalog()
    root = catalog.root(NAMESPACE)
    with pytest.raises(AssertionError, match="pin the parent"):
        admit(catalog, root, FIRST)
    catalog.pin((root,))
    partial = store(catalog, root, [1] * 5)
    with pytest.raises(AssertionError, match="only full pages"):
        admit(catalog, partial, FIRST)
    catalog.unpin((partial,))
    with pytest.raises(AssertionError, match="unpin without pin"):
        catalog.unpin((partial,))
    first = admit(catalog, root, SECOND).page
    assert first is not None
    second = admit(catalog, first, SECOND).page
    assert second is not None
    with pytest.raises(AssertionError, match="commit the parent"):
        catalog.commit(second)


def test_a_damaged_page_is_not_matched_until_it_is_written_again() -> None:
    catalog = make_catalog()
    root = pinned_root(catalog)
    first = store(catalog, root, FIRST)
    second = store(catalog, first, SECOND)
    catalog.unpin((first, second))
    catalog.pin((first,))
    catalog.condemn(first)
    assert find(catalog, FIRST + SECOND).tokens == 0
    assert admit(catalog, root, FIRST).reason == "busy", "somebody may be reading it"
    catalog.unpin((first,))
    again = admit(catalog, root, FIRST)
    assert again.fill is first
    catalog.commit(first)
    assert find(catalog, FIRST + SECOND).pages == (first, second), "what follows was never wrong"
    catalog.unpin((first,))
    catalog.condemn(second)
    assert catalog.pages == 1, "a damaged page that nothing needs goes at once"
