"""The pool of slots against a set."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailreplay.slots import SlotPool


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
