"""Hiddens held for pages to come."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tailreplay.engines.vllm.held import FEW, HeldHiddens, step_rows


def rows(start: int, count: int) -> torch.Tensor:
    column = torch.arange(start, start + count, dtype=torch.float32)[:, None]
    return torch.stack([column, -column])


def test_what_was_added_is_taken_in_order() -> None:
    held = HeldHiddens(100)
    held.add(100, rows(100, 3))
    held.add(103, rows(103, 4))
    first, second = held.take(100, 5)
    assert first[:, 0].tolist() == [100, 101, 102, 103, 104]
    assert torch.equal(second, -first)
    # Taken again for a longer page, then from later on.
    assert held.take(100, 7)[0][:, 0].tolist() == list(range(100, 107))
    held.add(107, rows(107, 1))
    assert held.take(105, 3)[0][:, 0].tolist() == [105, 106, 107]


def test_gaps_and_missing_rows_are_errors() -> None:
    held = HeldHiddens(0)
    held.add(0, rows(0, 4))
    with pytest.raises(ValueError, match="do not follow"):
        held.add(5, rows(5, 1))
    with pytest.raises(ValueError, match="held"):
        held.take(2, 3)
    held.release(2)
    assert held.take(2, 2)[0][:, 0].tolist() == [2, 3]
    with pytest.raises(ValueError, match="held"):
        held.take(0, 1)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_any_part_that_was_not_released_is_there(counts: list[int], draw: random.Random) -> None:
    held, start, end = HeldHiddens(7), 7, 7
    for count in counts:
        held.add(end, rows(end, count))
        end += count
        if draw.random() < 0.3:
            start = draw.randint(start, end)
            held.release(start)
        first = draw.randint(start, end)
        wanted = draw.randint(0, end - first)
        if wanted:
            assert torch.equal(held.take(first, wanted), rows(first, wanted))


def test_what_is_left_of_a_long_chunk_does_not_keep_the_rest_alive() -> None:
    held = HeldHiddens(0)
    held.add(0, torch.arange(2000.0)[None, :, None])
    held.add(2000, torch.arange(2000.0, 4000.0)[None, :, None])
    whole = held.take(0, 3968)
    assert whole.shape[1] == 3968
    held.release(3968)
    rest = held.take(3968, 32)
    assert rest.untyped_storage().nbytes() == rest.nbytes
    assert rest[0, :, 0].tolist() == list(range(3968, 4000))
    held.release(4000)
    held.add(4000, rows(4000, 1)[:1])
    assert held.take(4000, 1).shape[1] == 1


def test_shared_copies_are_let_go_after_a_while() -> None:
    held = HeldHiddens(0)
    shared = [torch.full((1, 100, 1), float(at)) for at in range(200)]
    for at, copy in enumerate(shared):
        held.add(at, copy[:, 3:4])
    kept = sum(rows.untyped_storage().nbytes() for rows in held._chunks)
    assert kept < 80 * 400
    assert held.take(0, 200)[0, :, 0].tolist() == list(range(200))


def step(*counts: int) -> tuple[list[Any], dict[str, int], list[torch.Tensor]]:
    """A batch in which one request comes after the other, and taps that say which row they are of."""
    found, first, at = [], {}, 0
    for index, count in enumerate(counts):
        found.append(SimpleNamespace(request=str(index), count=count))
        first[str(index)] = at
        at += count
    taps = [torch.arange(at + 5.0)[:, None] + 1000 * group for group in range(3)]
    return found, first, taps


@pytest.mark.parametrize("counts", [(1, 1, 1), (1, 500, 1), (FEW, FEW + 1), (500,), (1, FEW + 1, 1, 40, 2)])
def test_each_request_gets_its_rows_of_every_tap(counts: tuple[int, ...]) -> None:
    found, first, taps = step(*counts)
    copies = step_rows(taps, found, first)
    expected = [tap.clone() for tap in taps]
    for tap in taps:
        tap.zero_()  # the next forward writes there
    for row in found:
        at = first[row.request]
        assert torch.equal(copies[row.request], torch.stack([tap[at : at + row.count] for tap in expected]))


def test_decoding_requests_share_one_copy_and_long_ones_keep_nobody_else_alive() -> None:
    found, first, taps = step(1, 500, 1, 1)
    copies = step_rows(taps, found, first)
    addresses = {copies[name].untyped_storage().data_ptr() for name in "023"}
    assert len(addresses) == 1
    assert copies["0"].untyped_storage().nbytes() == 3 * copies["0"].nbytes
    assert copies["1"].untyped_storage().nbytes() == copies["1"].nbytes


def test_a_stage_that_stores_no_hiddens_still_follows_its_requests() -> None:
    found, first, _ = step(4, 30)
    copies = step_rows([], found, first)
    held = HeldHiddens(0)
    held.add(0, copies["0"])
    held.add(4, copies["1"])
    assert len(held.take(0, 34)) == 0
    with pytest.raises(ValueError, match="do not follow"):
        held.add(35, copies["0"])
