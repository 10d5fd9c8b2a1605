"""Hiddens held for pages to come."""

from __future__ import annotations

import pytest
import torch

from tailreplay.engines.vllm.held import HeldHiddens


def rows(start: int, count: int) -> list[torch.Tensor]:
    column = torch.arange(start, start + count, dtype=torch.float32)[:, None]
    return [column, -column]


def test_what_was_added_is_taken_in_order() -> None:
    held = HeldHiddens(2, 100)
    held.add(100, 3, rows(100, 3))
    held.add(103, 4, rows(103, 4))
    first, second = held.take(100, 5)
    assert first[:, 0].tolist() == [100, 101, 102, 103, 104]
    assert torch.equal(second, -first)
    # Taken again for a longer page, then from later on.
    assert held.take(100, 7)[0][:, 0].tolist() == list(range(100, 107))
    held.add(107, 1, rows(107, 1))
    assert held.take(105, 3)[0][:, 0].tolist() == [105, 106, 107]


def test_gaps_and_missing_rows_are_errors() -> None:
    held = HeldHiddens(1, 0)
    held.add(0, 4, rows(0, 4)[:1])
    with pytest.raises(ValueError, match="do not follow"):
        held.add(5, 1, rows(5, 1)[:1])
    with pytest.raises(ValueError, match="held"):
        held.take(2, 3)
    held.take(2, 2)
    with pytest.raises(ValueError, match="held"):
        held.take(0, 1)


def test_held_rows_do_not_change_with_the_buffer_they_came_from() -> None:
    buffer = torch.ones(4, 2)
    held = HeldHiddens(1, 0)
    held.add(0, 2, [buffer[:2]])
    buffer.zero_()
    assert held.take(0, 2)[0].tolist() == [[1, 1], [1, 1]]


def test_a_stage_that_stores_no_hiddens_still_follows_its_requests() -> None:
    held = HeldHiddens(0, 0)
    held.add(0, 4, [])
    held.add(4, 2, [])
    assert held.take(0, 6) == []
    with pytest.raises(ValueError, match="do not follow"):
        held.add(9, 1, [])


def test_what_is_held_does_not_keep_a_long_chunk_alive() -> None:
    held = HeldHiddens(1, 0)
    held.add(0, 1000, [torch.arange(1000.0)[:, None]])
    held.take(0, 500)
    rest = held.take(900, 100)[0]
    assert rest.untyped_storage().nbytes() == 4000
    held.compact()
    rest = held.take(900, 100)[0]
    assert rest.untyped_storage().nbytes() == 400
    assert rest[:, 0].tolist() == list(range(900, 1000))
