"""Hiddens held for pages to come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

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
    held.take(2, 2)
    with pytest.raises(ValueError, match="held"):
        held.take(0, 1)


def test_what_is_held_does_not_keep_a_long_chunk_alive() -> None:
    held = HeldHiddens(0)
    held.add(0, torch.arange(1000.0)[None, :, None])
    held.take(0, 500)
    for start in (900, 995):
        rest = held.take(start, 1000 - start)
        assert rest.untyped_storage().nbytes() > 2 * rest.nbytes
        held.compact()
        rest = held.take(start, 1000 - start)
        assert rest.untyped_storage().nbytes() == rest.nbytes
        assert rest[0, :, 0].tolist() == list(range(start, 1000))


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
