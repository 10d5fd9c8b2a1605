"""The queue of evictable pages."""

from __future__ import annotations

import random

from tailreplay.eviction import LeastRecentlyUsed, Victims
from tailreplay.page import Page, root_page
from tailreplay.provenance import EXACT
from tailreplay.quotas import Shares


def make_pages(count: int) -> list[Page]:
    root = root_page(b"root", 0, bytes(8))
    pages = [Page(b"%d" % number, b"ids.", root, number, EXACT, number) for number in range(count)]
    for page in pages:
        page.ready = True
    return pages


def make_queue() -> Victims:
    return Victims(LeastRecentlyUsed().rank, lambda page: page.is_evictable, Shares())


def drain(queue: Victims) -> list[Page]:
    return list(iter(queue.pop, None))


def test_the_least_recently_used_goes_first_and_the_oldest_of_equals() -> None:
    pages = make_pages(4)
    queue = make_queue()
    for page, used in zip(pages, [3, 1, 2, 1], strict=True):
        page.last_used = used
        queue.push(page)
    assert drain(queue) == [pages[1], pages[3], pages[2], pages[0]]
    assert queue.pop() is None


def test_pages_that_are_needed_again_are_passed_over() -> None:
    pinned, parent, used, removed, free = pages = make_pages(5)
    queue = make_queue()
    for page in pages:
        queue.push(page)
    pinned.pins = 1
    parent.children = 1
    removed.ready = False
    used.last_used = 9
    queue.push(used)
    assert drain(queue) == [free, used]


def test_the_order_survives_many_more_pushes_than_pages() -> None:
    # Stale entries are thrown out from time to time; none that is still true may go with them.
    rng = random.Random(0)
    pages = make_pages(1500)
    queue = make_queue()
    for page in pages:
        queue.push(page)
    for tick in range(1, 20_000):
        page = rng.choice(pages)
        page.last_used = tick
        queue.push(page)
        queue.push(page)
    order: list[Page] = []
    while (page := queue.pop()) is not None:
        page.ready = False
        order.append(page)
    assert order == sorted(pages, key=lambda page: (page.last_used, page.order))
