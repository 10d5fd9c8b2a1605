"""What a hit will do, and why a miss is one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tailreplay import Provenance, Ratio, Reuse, Topology
from tailreplay.costs import CostModel, LayerCost
from tailreplay.decisions import Match
from tailreplay.modes import parse_reuse
from tailreplay.page import Page, root_page
from tailreplay.plan import ReplayPlan, make_plan, without_reuse
from tailreplay.provenance import EXACT, Start

A, L, C = "full_attention", "linear_attention", "conv"
HYBRID = Topology.from_layer_types([L, A, L, A, L])
CONVOLUTIONS = Topology.from_layer_types([C, A, C, C], 3)
MIXED = Topology.from_layer_types([A, C, A, L], 3)
ATTENTION = Topology.from_layer_types([A, A])
QUANTISED = Provenance(0, lossy=True)
PAGE = 16


def match_of(tokens: int, *provenances: Provenance, stop: str = "diverged") -> Match:
    """A match of `tokens` tokens over pages of 16, all exact unless said otherwise."""
    count = -(-tokens // PAGE)
    each = [*provenances, *[EXACT] * (count - len(provenances))]
    pages: list[Page] = []
    parent = root_page(b"root", 0, bytes(8))
    for slot, provenance in enumerate(each):
        parent = Page(b"key", bytes(4 * PAGE), parent, slot, provenance, slot, hidden_slot=slot)
        pages.append(parent)
    return Match(tokens, tuple(pages), stop)


def without_hiddens(match: Match, *gone: int) -> Match:
    """The same match with the hiddens of some pages gone."""
    for index in gone:
        match.pages[index].hidden_slot = -1
    return match


def plan_of(
    match: Match, reuse: Reuse, topology: Topology = HYBRID, tokens: int = 500, min_match: int = 1
) -> ReplayPlan:
    return make_plan(match, tokens, reuse, topology, min_match=min_match)


# ---- hits


def test_a_hit_carries_what_was_asked_and_found() -> None:
    match = match_of(200)
    plan = plan_of(match, parse_reuse("replay", 0.1, min_tokens=8))
    assert (plan.tokens, plan.matched, plan.pages, plan.stop) == (500, 200, match.pages, "diverged")
    assert (plan.mode, plan.ratio, plan.miss_reason) == ("replay", 0.1, "")
    assert plan.tails == (20, 20, 20)
    assert plan.replayed == 20
    assert plan.estimate is None


@pytest.mark.parametrize(
    ("reuse", "topology", "tokens", "exact"),
    [
        (parse_reuse("replay"), HYBRID, 200, False),
        (parse_reuse("replay"), HYBRID, 64, True),  # the shortest tail is the whole match
        (parse_reuse("replay"), HYBRID, 65, False),
        (parse_reuse("replay", 1.0), HYBRID, 200, True),
        (parse_reuse("exact"), HYBRID, 200, True),
        (parse_reuse("zero"), HYBRID, 200, False),
        (parse_reuse("zero"), ATTENTION, 200, True),  # no states, nothing to approximate
        (parse_reuse("replay"), ATTENTION, 200, True),
        (parse_reuse("replay"), CONVOLUTIONS, 200, True),  # the receptive field is enough
        (parse_reuse("zero"), CONVOLUTIONS, 200, False),
        (parse_reuse("replay"), MIXED, 200, False),  # one recurrent group spoils it
    ],
)
def test_exact_is_said_only_when_every_group_is_rebuilt_wholly(
    reuse: Reuse, topology: Topology, tokens: int, exact: bool
) -> None:
    plan = plan_of(match_of(tokens), reuse, topology)
    assert plan.exact is exact
    assert plan.provenance == (EXACT if exact else Provenance(1, start=Start.ZERO))


@pytest.mark.parametrize(
    ("provenances", "reuse", "wanted"),
    [
        ([EXACT, Provenance(2)], parse_reuse("replay", 1.0), Provenance(2)),
        ([EXACT, Provenance(2)], parse_reuse("replay"), Provenance(3, start=Start.ZERO)),
        ([Provenance(3), Provenance(1)], parse_reuse("replay"), Provenance(4, start=Start.ZERO)),
        ([QUANTISED], parse_reuse("replay", 1.0), QUANTISED),
        ([QUANTISED, Provenance(1)], parse_reuse("replay"), Provenance(2, True, Start.ZERO)),
    ],
)
def test_what_is_computed_after_a_hit_inherits_the_worst_of_it(
    provenances: list[Provenance], reuse: Reuse, wanted: Provenance
) -> None:
    plan = plan_of(match_of(200, *provenances), reuse)
    assert plan.provenance == wanted
    assert not plan.exact


def test_provenance_is_ordered_and_shown() -> None:
    assert EXACT < QUANTISED < Provenance(1) < Provenance(1, lossy=True) < Provenance(2)
    assert [str(each) for each in (EXACT, QUANTISED, Provenance(2))] == ["exact", "quantised", "approximate (depth 2)"]
    assert [each.is_exact for each in (EXACT, QUANTISED, Provenance(1))] == [True, False, False]


# ---- misses


@pytest.mark.parametrize(
    ("match", "mode", "tokens", "min_match", "reason"),
    [
        (match_of(0, stop="end"), "off", 500, 1, "off"),
        (match_of(0, stop="end"), "replay", 1, 1, "prompt_too_short"),
        (match_of(0, stop="end"), "replay", 0, 1, "prompt_too_short"),
        (match_of(0, stop="unseen"), "replay", 500, 1, "unseen_prefix"),
        (match_of(0, stop="diverged"), "exact", 500, 1, "unseen_prefix"),
        (match_of(0, stop="approximate"), "exact", 500, 1, "only_approximate_pages"),
        (match_of(31), "replay", 500, 32, "below_min_match"),
        (match_of(32), "replay", 500, 32, ""),
    ],
)
def test_every_miss_has_its_reason(match: Match, mode: str, tokens: int, min_match: int, reason: str) -> None:
    plan = plan_of(match, parse_reuse(mode), tokens=tokens, min_match=min_match)
    assert plan.miss_reason == reason
    assert plan.stop == match.stop
    if reason:
        # A miss uses nothing, so whatever is computed after it is exact.
        assert (plan.matched, plan.pages, plan.tails, plan.replayed) == (0, (), (0, 0, 0), 0)
        assert (plan.exact, plan.provenance) == (True, EXACT)


def test_a_plan_whose_load_failed_becomes_a_miss() -> None:
    hit = make_plan(match_of(200, Provenance(1)), 500, parse_reuse("replay"), HYBRID, costs=COSTS)
    miss = without_reuse(hit, "load_failed")
    assert (miss.matched, miss.pages, miss.tails, miss.estimate) == (0, (), (0, 0, 0), None)
    assert (miss.exact, miss.provenance, miss.miss_reason) == (True, EXACT, "load_failed")
    assert (miss.tokens, miss.mode, miss.ratio, miss.stop) == (hit.tokens, hit.mode, hit.ratio, hit.stop)


# ---- costs

LAYERS = (
    LayerCost(mixer=100, ffn=10),
    LayerCost(mixer=50, ffn=20, per_pair=4),
    LayerCost(mixer=200, ffn=30),
    LayerCost(mixer=60, ffn=40, per_pair=6),
    LayerCost(mixer=300, ffn=50),
)
COSTS = CostModel(HYBRID, LAYERS, head=1000, kv_bytes=64, hidden_bytes=(8, 16), state_bytes=4096)


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 7), (5, 9), (4, 4)])
def test_a_prefill_costs_what_its_tokens_cost_one_by_one(start: int, stop: int) -> None:
    one_by_one = sum(
        layer.mixer + layer.ffn + layer.per_pair * (at + 1) for at in range(start, stop) for layer in LAYERS
    )
    assert COSTS.prefill_flops(start, stop) == one_by_one + 1000


def test_replay_skips_what_comes_after_the_last_mixer() -> None:
    assert COSTS.replay_flops((3, 2, 1)) == 3 * 100 + 2 * 200 + 1 * 300
    two = Topology.from_layer_types([A, L, L, A, L])
    assert CostModel(two, LAYERS, 0, 0, (0, 0), 0).replay_flops((2, 0)) == 2 * (50 + 20 + 200)


def test_a_hit_loads_all_keys_and_values_and_the_tails_of_stored_groups() -> None:
    # The first group is fed by the embedding: its tail is not loaded.
    assert COSTS.hit_bytes(10, (5, 3, 2)) == 10 * 64 + 3 * 8 + 2 * 16
    assert COSTS.page_bytes_per_token == 64 + 8 + 16


def test_a_plan_has_the_estimate_of_its_own_tails() -> None:
    plan = make_plan(match_of(200), 500, Reuse("replay", Ratio(0.1, 0)), HYBRID, costs=COSTS)
    assert plan.estimate is not None
    assert plan.estimate.bytes == COSTS.hit_bytes(200, (20, 20, 20))
    assert plan.estimate.replay_flops == COSTS.replay_flops((20, 20, 20))
    assert plan.estimate.hit_flops == plan.estimate.replay_flops + COSTS.prefill_flops(200, 500)
    assert plan.estimate.full_flops == COSTS.prefill_flops(0, 500)


# ---- hiddens that are gone


@pytest.mark.parametrize(
    ("gone", "mode", "ratio", "m", "tail", "short"),
    [
        # 160 tokens in 10 pages; r = 30% wants 48.
        ((), "replay", 0.3, 160, 48, False),
        ((0, 1, 6), "replay", 0.3, 160, 48, False),  # before the tail
        ((7,), "replay", 0.3, 160, 32, True),  # 32 of 48 are there: at least half
        ((8,), "replay", 0.3, 128, 39, False),  # 16 of 48 are not
        ((9,), "replay", 0.3, 144, 44, False),
        ((9, 7), "replay", 0.3, 112, 34, False),  # 16 of 44 are not
        ((9, 6), "replay", 0.3, 144, 32, True),
        (range(1, 10), "replay", 0.3, 16, 5, False),
        (range(10), "replay", 0.3, 0, 0, False),
        ((7,), "exact", None, 112, 112, False),  # exact mode takes no shorter tail
        ((0,), "exact", None, 0, 0, False),
        (range(10), "zero", None, 160, 0, False),  # nothing is replayed: none are needed
    ],
)
def test_where_hiddens_are_gone_a_hit_is_shorter_or_its_tail_is(
    gone: tuple[int, ...], mode: str, ratio: float | None, m: int, tail: int, short: bool
) -> None:
    plan = plan_of(without_hiddens(match_of(160), *gone), parse_reuse(mode, ratio, min_tokens=0))
    assert (plan.matched, plan.replayed, plan.short_tail) == (m, tail, short)
    assert len(plan.pages) == -(-m // PAGE)
    assert plan.stop == ("diverged" if m == 160 or not m else "no_hiddens")
    assert plan.miss_reason == ("" if m else "no_hiddens")
    assert plan.exact == (mode == "exact" or not m)


def test_models_without_stored_groups_need_no_hiddens() -> None:
    match = without_hiddens(match_of(160), *range(10))
    assert plan_of(match, parse_reuse("exact"), ATTENTION).matched == 160
    assert plan_of(match, parse_reuse("exact"), Topology.from_layer_types([L, A, A])).matched == 160


def test_a_match_that_is_too_short_without_its_hiddens_is_a_miss() -> None:
    match = without_hiddens(match_of(160), *range(1, 10))
    plan = plan_of(match, parse_reuse("replay"), min_match=32)
    assert (plan.matched, plan.pages, plan.miss_reason) == (0, (), "no_hiddens")


# ---- lengths that an engine is quick at


@pytest.mark.parametrize(
    ("tokens", "asked", "tail"),
    [
        (200, 20, 64),  # the next bucket
        (200, 64, 64),
        (200, 65, 128),
        (100, 65, 65),  # no bucket within the match
        (200, 150, 150),  # none left
        (64, 10, 64),  # the whole match
    ],
)
def test_tails_are_lengthened_to_buckets(tokens: int, asked: int, tail: int) -> None:
    reuse = Reuse("replay", Ratio(asked / tokens, min_tokens=1), buckets=(64, 128))
    plan = plan_of(match_of(tokens), reuse)
    assert plan.tails == (tail,) * 3
    assert plan.exact == (tail == tokens)
    assert (plan.ratio, plan.short_tail) == (asked / tokens, False)


def test_a_bucket_needs_its_hiddens() -> None:
    """A tail that is there is not called short for a bucket that is not."""
    reuse = Reuse("replay", Ratio(0.2, min_tokens=1), buckets=(64,))
    plan = plan_of(without_hiddens(match_of(200), 9), reuse)
    assert (plan.matched, plan.tails, plan.short_tail) == (200, (40,) * 3, False)


def test_buckets_are_for_recurrences_in_replay_mode() -> None:
    buckets = (64,)
    assert plan_of(match_of(200), replace(parse_reuse("zero"), buckets=buckets)).tails == (0, 0, 0)
    assert plan_of(match_of(200), replace(parse_reuse("exact"), buckets=buckets)).tails == (200, 200, 200)
    field = CONVOLUTIONS.groups[0].receptive_field
    plan = plan_of(match_of(200), Reuse("replay", Ratio(0.01, 1), buckets), CONVOLUTIONS)
    assert field is not None
    assert all(k <= group.receptive_field for k, group in zip(plan.tails, CONVOLUTIONS.groups, strict=True))
