"""What is to be computed again: noted, joined, bounded. And how fast a machine is taken to be."""

from __future__ import annotations

import pytest

from tailreplay.keys import Namespace, token_list
from tailreplay.pace import Pace
from tailreplay.plan import Estimate
from tailreplay.repairs import Repairs

ONE, TWO = (Namespace(name, "layout", 16) for name in ("one", "two"))


def taken(repairs: Repairs) -> list[tuple[str, list[int], int]]:
    found = []
    while (repair := repairs.take()) is not None:
        found.append((repair.namespace.model, token_list(repair.ids), repair.branch))
    assert len(repairs) == 0
    return found


def test_the_last_noted_goes_first_and_turns_of_a_conversation_are_one() -> None:
    repairs = Repairs()
    repairs.note(ONE, [1, 2, 3], 2)
    repairs.note(ONE, [7, 8], 1)
    repairs.note(TWO, [1, 2], 1)
    repairs.note(ONE, [1, 2, 3, 4], 3)
    # Another model's are other sequences; the branch is where the first of the turns left the exact pages.
    assert taken(repairs) == [("one", [1, 2, 3, 4], 2), ("two", [1, 2], 1), ("one", [7, 8], 1)]


def test_what_is_remembered_is_bounded() -> None:
    repairs = Repairs(most=2, most_tokens=10)
    for first in range(4):
        repairs.note(ONE, [first, 0], 1)
    assert [ids for _, ids, _ in taken(repairs)] == [[3, 0], [2, 0]]
    repairs.note(ONE, [1] * 6, 1)
    repairs.note(ONE, [2] * 6, 1)
    assert len(repairs) == 1
    repairs.note(ONE, [3] * 60, 1)
    assert [len(ids) for _, ids, _ in taken(repairs)] == [60], "the last one stays, however long"


def test_what_was_taken_is_not_taken_again_unless_it_is_put_back() -> None:
    repairs = Repairs(most=2)
    repairs.note(ONE, [1, 2], 1)
    repair = repairs.take()
    assert repair is not None
    repairs.note(ONE, [1, 2], 1)
    assert len(repairs) == 0, "it could not be stored, and would be computed for ever"
    repairs.put_back(repair)
    assert repairs.take() == repair
    # Forgotten in the end.
    for first in (3, 4):
        repairs.note(ONE, [first], 1)
        repairs.take()
    repairs.note(ONE, [1, 2], 1)
    assert len(repairs) == 1


def test_a_pace_predicts_what_it_has_seen() -> None:
    pace = Pace()
    estimate = Estimate(bytes=1000, replay_flops=2e6, hit_flops=5e6, full_flops=9e6)
    assert pace.predict(estimate) is None
    pace.observe(estimate, copy=0.1, replay=0.2, prefill=0.3)
    assert pace.predict(estimate) == pytest.approx(0.6)
    assert pace.predict(Estimate(0, 0.0, 6e6, 6e6)) == pytest.approx(0.6)
    # What is too short to be timed says nothing.
    pace.observe(estimate, copy=0.0, replay=0.0, prefill=0.3)
    assert pace.predict(estimate) == pytest.approx(0.6)
    pace.observe(estimate, copy=0.1, replay=0.2, prefill=3.0)
    assert pace.predict(estimate) > 0.6
