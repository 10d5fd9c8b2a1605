"""The pool of slots against a set."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailreplay.slots import SlotPool, divide


@given(count=st.integers(0, 6), steps=st.lists(st.one_of(st.none(), st.integers(0, 5)), max_size=40))
def test_the_lowest_free_slot_is_handed_out(count: int, steps: list[int | None]) -> None:
    pool = SlotPool(count)
    used: set[int] = set()
    for step in steps:
        if step is None:
            free = set(range(count)) - used
            taken = pool.take()
            assert taken == min(free, default=None)
            if taken is not None:
                used.add(taken)
        elif used:
            slot = sorted(used)[step % len(used)]
            pool.give_back(slot)
            used.remove(slot)
        assert pool.used == len(used)


@pytest.mark.parametrize(
    ("limit", "share", "pages", "hiddens"),
    [
        (1000, 1.0, 10, 10),
        (1000, 0.5, 12, 7),
        (1000, 0.25, 14, 4),
        (100, 0.25, 1, 1),
        (145, 0.25, 1, 1),
        (160, 0.01, 2, 1),
    ],
)
def test_bytes_are_divided_so_that_some_hiddens_fit(limit: int, share: float, pages: int, hiddens: int) -> None:
    assert divide(limit, 60, 40, share) == (pages, hiddens)
    assert pages * 60 + hiddens * 40 <= limit
    assert divide(limit, 60, 0, share) == (limit // 60, limit // 60)
