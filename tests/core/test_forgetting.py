"""Tails from what heads forget: predictions against recurrences, and the budget that follows them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tailreplay import Adaptive, InvalidRequestError, Ratio, Topology
from tailreplay.budget import Tails
from tailreplay.forgetting import Calibration, Forgetting, forgetting_of, segmented, slow_heads, tail_errors
from tailreplay.keys import token_bytes
from tailreplay.modes import Reuse, parse_replay, parse_reuse
from tailreplay.page import Page, root_page
from tailreplay.page_format import decode_gates, encode_gates
from tailreplay.plan import ReplayPlan
from tailreplay.provenance import EXACT
from tests.core.tiny import NAMESPACE, PAGE, contents, look_up, make_cache

ONE = Topology.from_layer_types(["full_attention", "linear_attention"])
TWO = Topology.from_layer_types(["full_attention", "linear_attention", "linear_attention"])
CONV = Topology.from_layer_types(["full_attention", "conv", "conv"], 4)
PROVEN = Calibration(drift=1.0, gain=0.0, floor=0.0)


def steady(horizons: list[list[float]], tokens: int = 4096, page: int = 64) -> Forgetting:
    """What a match forgets whose heads keep 1/e over `horizons`, by layer and head."""
    pages = tokens // page
    sums = np.repeat(-page / np.array(horizons)[None], pages, axis=0)
    shares = np.full(sums.shape[1:], 1 / sums.shape[2])
    return segmented(range(0, tokens, page), tokens, sums, shares)


def tails(budget: Adaptive, forgetting: Forgetting | None, topology: Topology = ONE, matched: int = 4096) -> Tails:
    return budget.tails(matched, topology, lambda longest: forgetting)


# ---- predictions


def test_few_segments_do_for_any_length() -> None:
    counts = [len(steady([[100.0]], tokens).starts) for tokens in (64, 640, 6400, 64_000, 640_000)]
    assert counts[:2] == [1, 10]
    assert counts[-1] < 60
    forgetting = steady([[100.0]], 6400)
    assert forgetting.starts[0] == 0
    assert forgetting.decay.sum() == pytest.approx(-64)
    # Neither the tail nor what a finer one would reach is far off.
    assert max(long / short for long, short in zip(forgetting.tails, forgetting.tails[1:], strict=False)) <= 2


def test_a_first_layer_keeps_what_its_gates_say() -> None:
    forgetting = steady([[100.0, 1000.0]])
    errors = tail_errors(forgetting, ONE, PROVEN)[:, 0]
    expected = np.sqrt((np.exp(-2 * forgetting.tails / 100) + np.exp(-2 * forgetting.tails / 1000)) / 2)
    assert errors[0] == 0.0  # the whole prefix
    np.testing.assert_allclose(errors[1:], expected[1:], rtol=1e-9)


def test_a_deeper_layer_adds_what_it_reads() -> None:
    forgetting = steady([[50.0], [50.0]])
    alone = tail_errors(forgetting, TWO, PROVEN)
    np.testing.assert_allclose(alone[:, 0], alone[:, 1])
    behind = tail_errors(forgetting, TWO, Calibration(1.0, 0.5, 0.0))
    np.testing.assert_allclose(behind[:, 0], alone[:, 0])
    assert (behind[1:, 1] > alone[1:, 1]).all()
    assert (np.diff(behind[1:], axis=0) > 0).all()  # a shorter tail is never better
    of_each = tail_errors(forgetting, TWO, Calibration(1.0, (9.0, 0.5), 0.0))
    np.testing.assert_allclose(of_each, behind)
    rounded = tail_errors(forgetting, TWO, Calibration(1.0, 0.5, 0.01))
    np.testing.assert_allclose(rounded[:, 0], behind[:, 0])
    np.testing.assert_allclose(rounded[1:, 1], np.maximum(behind[1:, 1], 0.01))
    assert rounded[0, 1] == 0


def test_the_deeper_layers_term_bounds_a_recurrence() -> None:
    """Two scalar layers, the second of which reads the first: its true error stays below the prediction."""
    generator = np.random.default_rng(0)
    for _ in range(50):
        tokens, slow = 1024, generator.uniform(20, 300, 2)
        alpha = np.exp(-1 / slow)
        inputs, first, second = np.ones(tokens), np.zeros(tokens + 1), np.zeros(tokens + 1)
        for i in range(tokens):
            first[i + 1] = alpha[0] * first[i] + inputs[i]
            second[i + 1] = alpha[1] * second[i] + first[i + 1]
        forgetting = steady([[slow[0]], [slow[1]]], tokens)
        predicted = tail_errors(forgetting, TWO, Calibration(1.0, 1.0))
        for row, tail in enumerate(forgetting.tails):
            states = np.zeros(2)
            for i in range(tokens - tail, tokens):
                states[0] = alpha[0] * states[0] + inputs[i]
                states[1] = alpha[1] * states[1] + states[0]
            measured = 1 - states / np.array([first[-1], second[-1]])
            assert (measured <= predicted[row] + 1e-9).all()


def test_slow_heads_keep_more_than_a_share_of_what_they_held() -> None:
    horizons = np.array([[10.0, 512.0, 513.0], [1e9, 511.0, 100.0]])
    assert slow_heads(horizons, 512).tolist() == [[False, False, True], [True, False, False]]
    assert slow_heads(horizons, 512, left=0.001).tolist() == [[False, True, True], [True, True, True]]


# ---- the budget


def test_fast_heads_get_shorter_tails_than_slow_ones() -> None:
    lengths = [tails(Adaptive(0.05, most=1), steady([[horizon]])).tokens[0] for horizon in (5, 50, 100, 300, 1000)]
    assert lengths[0] == 64
    assert lengths == sorted(set(lengths))
    for horizon, length in zip((50, 100, 300, 1000), lengths[1:], strict=True):
        needed = horizon * math.log(Adaptive().calibration.drift / 0.05)
        assert needed <= length <= 1.3 * needed + 64


def test_each_group_gets_its_own_tail() -> None:
    topology = Topology.from_layer_types(["linear_attention", "full_attention", "linear_attention"])
    chosen = tails(Adaptive(0.05, most=1), steady([[20.0], [400.0]]), topology)
    assert chosen.tokens[0] < chosen.tokens[1] < 4096
    assert chosen.note == ""
    assert chosen.predicted_error is not None
    assert 0 < chosen.predicted_error <= 0.05


def test_a_larger_error_takes_a_shorter_tail() -> None:
    lengths = [tails(Adaptive(error, most=1), steady([[200.0]])).tokens[0] for error in (0.01, 0.05, 0.2, 0.5, 1.0)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1]


def test_a_tail_that_would_be_too_long_is_cut_and_says_so() -> None:
    chosen = tails(Adaptive(0.05, most=0.1), steady([[1000.0]]))
    assert chosen.tokens == (410,)
    assert chosen.note == "cut"
    assert chosen.predicted_error is not None
    assert chosen.predicted_error > 0.05


def test_missing_gates_fall_back_to_the_ratio_and_say_so() -> None:
    budget = Adaptive(0.05, fallback=0.1)
    assert tails(budget, None) == Tails((410,), None, "no_gates")
    # Gates of the last pages only, which are too few for this error.
    late = segmented(range(3968, 4096, 64), 4096, np.full((2, 1, 1), -0.1), np.ones((1, 1)))
    assert tails(budget, late) == Tails((410,), None, "no_gates")
    assert tails(Adaptive(0.9, calibration=PROVEN), late) == Tails((128,), pytest.approx(math.exp(-0.2)), "")


def test_short_matches_and_convolutions_are_exact_without_gates() -> None:
    assert tails(Adaptive(0.05), None, matched=64) == Tails((64,), 0.0)
    assert tails(Adaptive(0.05), None, CONV) == Tails((7,), 0.0)


@pytest.mark.parametrize("error", [0, -0.1, 1.5, math.nan, True, "0.05", None])
def test_bad_errors_are_refused(error: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"The state error must be a number in \(0, 1\]") as refusal:
        Adaptive(error)
    assert refusal.value.param == "error"


def test_the_words_of_requests() -> None:
    assert parse_reuse(error=0.1, min_tokens=8) == Reuse("replay", Adaptive(0.1, 8), start="anchor")
    assert parse_replay(Adaptive(0.2)) == Reuse("replay", Adaptive(0.2), start="anchor")
    assert parse_replay(Ratio(0.2)) == Reuse("replay", Ratio(0.2))
    assert parse_reuse(error=0.1).ratio is None
    with pytest.raises(InvalidRequestError, match="not both") as both:
        parse_reuse("replay", 0.1, error=0.1)
    assert both.value.param == "error"
    with pytest.raises(InvalidRequestError, match="goes with mode 'replay' only, not with 'exact'"):
        parse_reuse("exact", error=0.1)


# ---- pages that know their gates


def gates(horizon: float, layers: int = 2, heads: int = 3) -> np.ndarray[Any, Any]:
    return np.stack([np.full((layers, heads), -PAGE / horizon), np.full((layers, heads), 1 / heads)]).astype(np.float16)


def chain_of(count: int, horizon: float, known: int | None = None) -> list[Page]:
    pages = [root_page(b"r" * 32, 0, b"")]
    for index in range(count):
        page = Page(bytes([index]) * 32, token_bytes(range(PAGE)), pages[-1], 0, EXACT, index)
        page.gates = gates(horizon) if known is None or index >= count - known else None
        pages.append(page)
    return pages[1:]


def test_the_gates_of_a_match_end_where_a_page_has_none() -> None:
    pages = chain_of(20, 100.0)
    found = forgetting_of(pages, 20 * PAGE, 20 * PAGE)
    assert found is not None
    assert found.starts[0] == 0
    assert found.decay.sum(0) == pytest.approx(-20 * PAGE / 100, rel=1e-3)
    late = forgetting_of(chain_of(20, 100.0, known=3), 20 * PAGE, 20 * PAGE)
    assert late is not None
    assert late.starts == (17 * PAGE, 18 * PAGE, 19 * PAGE)
    assert forgetting_of(chain_of(20, 100.0, known=0), 20 * PAGE, 20 * PAGE) is None
    short = forgetting_of(pages, 20 * PAGE, 2 * PAGE)
    assert short is not None
    assert short.starts[0] == 18 * PAGE


def test_a_page_that_is_used_in_part_is_taken_to_forget_nothing() -> None:
    found = forgetting_of(chain_of(4, 100.0), 3 * PAGE + 5, 4 * PAGE)
    assert found is not None
    assert list(found.tails) == [3 * PAGE + 5, 2 * PAGE + 5, PAGE + 5, 5]
    assert (found.decay[-1] == 0).all()


def stored(horizon: float | None, tokens: int = 40 * PAGE) -> tuple[ReplayPlan, ReplayPlan]:
    """Plans of an adaptive request and of one for a ratio, over a prompt that is stored with these gates."""
    cache, prompt = make_cache(64), list(range(tokens + 1))
    chain = cache.open(NAMESPACE)
    pages = -(-len(prompt) // PAGE)
    known = None if horizon is None else [gates(horizon)] * pages
    cache.insert(chain, prompt, *contents(prompt, 0), EXACT, known)
    cache.close(chain)
    adaptive = look_up(cache, prompt, Reuse("replay", Adaptive(0.1, min_tokens=16, most=0.5)))
    return adaptive, look_up(cache, prompt, Reuse("replay", Ratio(0.05, 16)))


def test_plans_follow_the_gates_of_their_pages() -> None:
    fast, slow = stored(10.0)[0], stored(60.0)[0]
    assert fast.matched == slow.matched == 40 * PAGE
    assert fast.replayed < slow.replayed < 20 * PAGE
    for plan in (fast, slow):
        assert plan.budget_note == ""
        assert plan.predicted_error is not None
        assert plan.predicted_error <= 0.1
    cut = stored(1e4)[0]
    assert (cut.replayed, cut.budget_note) == (20 * PAGE, "cut")


def test_plans_over_pages_without_gates_take_the_ratios_tail() -> None:
    adaptive, ratio = stored(None)
    assert adaptive.tails == ratio.tails
    assert (adaptive.budget_note, adaptive.predicted_error) == ("no_gates", None)
    assert (ratio.budget_note, ratio.predicted_error) == ("", None)


def test_storing_once_more_gives_pages_the_gates_that_they_lack() -> None:
    cache, prompt = make_cache(64), list(range(20 * PAGE + 1))
    for known in (None, [gates(10.0)] * 21):
        chain = cache.open(NAMESPACE)
        cache.insert(chain, prompt, *contents(prompt, 0), EXACT, known)
        cache.close(chain)
    assert look_up(cache, prompt, Reuse("replay", Adaptive(0.1, 16, most=1))).budget_note == ""


def test_gates_are_written_as_text() -> None:
    known = gates(60.0)
    found = decode_gates(encode_gates(known))
    assert found is not None
    np.testing.assert_array_equal(found, known)
    assert encode_gates(None) == ""


@pytest.mark.parametrize(
    "text", ["", "x", "2x1x1:", "2x1x1:AAA=", "2x1x9:AAAAAA==", "1x1x2:AAAAAA==", "2x1x1:AHwAfA==", "-1:AA"]
)
def test_text_that_holds_no_gates_is_none(text: str) -> None:
    assert decode_gates(text) is None
