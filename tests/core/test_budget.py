"""How many tokens to replay, and the words that choose it."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailreplay import Exact, InvalidRequestError, Ratio, Reuse, Topology, Zero
from tailreplay.modes import parse_replay, parse_reuse

RECURRENT = Topology.from_layer_types(["full_attention", "linear_attention"]).groups[0]
CONV = Topology.from_layer_types(["full_attention", "conv", "conv"], 4).groups[0]
FIELD = 7


@pytest.mark.parametrize("matched", [1, 7, 100, 1000, 131_072, 1_000_000])
def test_a_ratio_takes_the_ceiling_as_on_paper(matched: int) -> None:
    # In floating point 0.07 * 100 is above 7.
    for thousandths in range(1, 1001):
        wanted = math.ceil(Fraction(thousandths, 1000) * matched)
        assert Ratio(thousandths / 1000, min_tokens=0).tail(matched, RECURRENT) == wanted


@given(ratio=st.floats(1e-6, 1), least=st.integers(0, 100), matched=st.integers(0, 5000))
def test_a_tail_is_neither_shorter_than_the_least_nor_longer_than_the_match(
    ratio: float, least: int, matched: int
) -> None:
    tail = Ratio(ratio, least).tail(matched, RECURRENT)
    assert min(least, matched) <= tail <= matched
    assert tail >= ratio * matched - 1e-6


def test_the_default_replays_short_matches_wholly() -> None:
    budget = Ratio(0.05)
    assert [budget.tail(m, RECURRENT) for m in (1, 63, 64, 65, 1280, 1281, 2000)] == [1, 63, 64, 64, 64, 65, 100]


@pytest.mark.parametrize("budget", [Ratio(0.5, 0), Ratio(0.001, 0), Ratio(1), Exact()])
def test_convolutions_get_their_receptive_field(budget: Ratio | Exact) -> None:
    assert CONV.receptive_field == FIELD
    assert [budget.tail(m, CONV) for m in (0, 3, FIELD, 500)] == [0, 3, FIELD, FIELD]


def test_exact_replays_everything_and_zero_nothing() -> None:
    assert [Exact().tail(m, RECURRENT) for m in (0, 1, 500)] == [0, 1, 500]
    assert [Zero().tail(m, group) for m in (1, 500) for group in (RECURRENT, CONV)] == [0] * 4


@pytest.mark.parametrize("ratio", [0, -0.1, 1.0001, math.nan, math.inf, True, "0.5", None, [0.5]])
def test_bad_ratios_are_refused(ratio: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"\(0, 1\]") as error:
        Ratio(ratio)
    assert error.value.param == "ratio"


@pytest.mark.parametrize("least", [-1, 1.5, True, "a", None])
def test_a_least_that_is_no_number_of_tokens_is_refused(least: Any) -> None:
    with pytest.raises(InvalidRequestError, match="min_tokens"):
        Ratio(0.5, least)


# ---- the words of requests


@pytest.mark.parametrize(
    ("arguments", "reuse"),
    [
        ({}, Reuse("replay", Ratio(0.05))),
        ({"mode": "replay", "ratio": 0.25, "min_tokens": 8}, Reuse("replay", Ratio(0.25, 8))),
        ({"mode": "exact"}, Reuse("exact", Exact())),
        ({"mode": "zero"}, Reuse("zero", Zero())),
        ({"mode": "off"}, Reuse("off", None)),
    ],
)
def test_requests_name_a_mode_and_a_ratio(arguments: dict[str, Any], reuse: Reuse) -> None:
    assert parse_reuse(**arguments) == reuse
    assert reuse.ratio == (arguments.get("ratio", 0.05) if reuse.mode == "replay" else None)


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"mode": "fast"}, "mode"),
        ({"mode": None}, "mode"),
        ({"mode": ["exact"]}, "mode"),
        ({"mode": "exact", "ratio": 0.5}, "ratio"),
        ({"mode": "off", "ratio": 0.5}, "ratio"),
        ({"ratio": 0}, "ratio"),
        ({"ratio": "0.5"}, "ratio"),
    ],
)
def test_requests_that_make_no_sense_are_refused(arguments: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        parse_reuse(**arguments)
    assert error.value.param == param


def test_one_argument_names_them_in_python() -> None:
    assert parse_replay(0.5, min_tokens=3) == Reuse("replay", Ratio(0.5, 3))
    assert parse_replay("exact") == Reuse("exact", Exact())
    assert parse_replay(Reuse("off", None)) == Reuse("off", None)
    with pytest.raises(InvalidRequestError):
        parse_replay("sometimes")
