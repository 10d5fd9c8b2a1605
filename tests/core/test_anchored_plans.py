"""Plans with anchors: the longest hit, the cheapest way to its states, and what is said of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailreplay import InvalidRequestError, Provenance, Topology
from tailreplay.anchor import Anchor
from tailreplay.decisions import Match
from tailreplay.keys import TOKEN_BYTES
from tailreplay.modes import Reuse, check_interval, parse_reuse
from tailreplay.page import Page, root_page
from tailreplay.plan import ReplayPlan, make_plan, without_reuse
from tailreplay.provenance import EXACT, ONLY_EXACT, Start, Terms

A, L, C = "full_attention", "linear_attention", "conv"
HYBRID = Topology.from_layer_types([L, A, L, A, L])
MIXED = Topology.from_layer_types([A, C, A, L], 3)
PAGE = 16
ZERO_START = Provenance(1, start=Start.ZERO)


def match_of(
    tokens: int,
    anchors: dict[int, Provenance],
    pages: Provenance = EXACT,
    lacking: frozenset[int] = frozenset(),
) -> Match:
    """A match of `tokens` tokens with states saved at `anchors`; pages in `lacking` have lost their hiddens."""
    made: list[Page] = [root_page(b"root", 0, bytes(8))]
    for slot in range(-(-tokens // PAGE)):
        hidden = -1 if slot in lacking else slot
        made.append(Page(b"key", bytes(TOKEN_BYTES * PAGE), made[-1], slot, pages, slot, hidden_slot=hidden))
    saved = []
    for order, (position, provenance) in enumerate(sorted(anchors.items())):
        parent = made[(position - 1) // PAGE]
        ids = bytes(TOKEN_BYTES * (position - parent.start - parent.tokens))
        saved.append(Anchor(parent, ids, order, provenance, order))
        assert saved[-1].position == position
    return Match(tokens, tuple(made[1:]), "diverged", tuple(saved))


def plan_of(match: Match, reuse: Reuse, topology: Topology = HYBRID) -> ReplayPlan:
    return make_plan(match, 5000, reuse, topology)


def summary(plan: ReplayPlan) -> tuple[int, int, str, int | None]:
    return plan.matched, plan.replayed, str(plan.start), plan.anchor.position if plan.anchor else None


@pytest.mark.parametrize(
    ("reuse", "anchors", "expected"),
    [
        (parse_reuse("exact"), {}, (1000, 1000, "complete", None)),
        (parse_reuse("exact"), {100: EXACT, 640: EXACT}, (1000, 360, "complete", 640)),
        (parse_reuse("exact"), {100: EXACT, 640: Provenance(1)}, (1000, 900, "complete", 100)),
        (parse_reuse("exact"), {1000: EXACT}, (1000, 0, "complete", 1000)),
        (parse_reuse("replay"), {960: EXACT}, (1000, 40, "complete", 960)),
        (parse_reuse("replay"), {936: EXACT}, (1000, 64, "complete", 936)),
        (parse_reuse("replay"), {935: EXACT}, (1000, 64, "carried", 935)),
        (parse_reuse("replay"), {100: EXACT, 500: EXACT}, (1000, 64, "carried", 500)),
        (parse_reuse("replay", start="anchor"), {935: EXACT}, (1000, 64, "zero", None)),
        (parse_reuse("replay", start="anchor"), {960: EXACT}, (1000, 40, "complete", 960)),
        (parse_reuse("replay", start="zero"), {960: EXACT, 1000: EXACT}, (1000, 64, "zero", None)),
        (parse_reuse("replay", 1.0), {960: EXACT}, (1000, 40, "complete", 960)),
        (parse_reuse("replay", 1.0), {}, (1000, 1000, "complete", None)),
        (parse_reuse("zero"), {1000: EXACT}, (1000, 0, "zero", None)),
        (parse_reuse("replay", reuse_approximate="never"), {960: Provenance(1)}, (1000, 64, "zero", None)),
    ],
)
def test_the_cheapest_way_that_the_mode_allows(
    reuse: Reuse, anchors: dict[int, Provenance], expected: tuple[int, int, str, int | None]
) -> None:
    assert summary(plan_of(match_of(1000, anchors), reuse)) == expected


def test_states_that_are_as_good_as_the_pages_go_before_nearer_ones() -> None:
    worse = Provenance(2, start=Start.ZERO)
    plan = plan_of(match_of(1000, {950: EXACT, 980: worse}), parse_reuse("replay"))
    assert summary(plan) == (1000, 50, "complete", 950)
    # On pages that are no better themselves the nearer ones spoil nothing.
    plan = plan_of(match_of(1000, {950: EXACT, 980: worse}, pages=worse), parse_reuse("replay"))
    assert summary(plan) == (1000, 20, "complete", 980)
    assert plan.provenance == worse, "going on from a state adds no replay to what lies behind it"


@pytest.mark.parametrize(
    ("anchors", "pages", "expected"),
    [
        ({960: EXACT}, EXACT, EXACT),
        ({960: EXACT}, ZERO_START, ZERO_START),
        ({960: ZERO_START}, EXACT, ZERO_START),
        ({500: EXACT}, EXACT, Provenance(1, start=Start.CARRIED)),
        ({500: ZERO_START}, ZERO_START, Provenance(2, start=Start.ZERO)),
        ({960: Provenance(0, lossy=True)}, EXACT, Provenance(0, lossy=True)),
        ({}, Provenance(0, lossy=True), Provenance(1, True, Start.ZERO)),
    ],
)
def test_what_follows_bears_the_worst_of_pages_and_states(
    anchors: dict[int, Provenance], pages: Provenance, expected: Provenance
) -> None:
    plan = plan_of(match_of(1000, anchors, pages), parse_reuse("replay"))
    assert plan.provenance == expected
    assert plan.exact is expected.is_exact


def test_without_hiddens_states_alone_make_a_hit() -> None:
    lacking = frozenset(range(40))  # tokens 0 .. 639
    match = match_of(1000, {600: EXACT, 700: EXACT}, lacking=lacking)
    assert summary(plan_of(match, parse_reuse("exact"))) == (1000, 300, "complete", 700)
    match = match_of(1000, {600: EXACT}, lacking=lacking)
    assert summary(plan_of(match, parse_reuse("exact"))) == (600, 0, "complete", 600)
    assert plan_of(match_of(1000, {}, lacking=lacking), parse_reuse("exact")).miss_reason == "no_hiddens"
    # Replay needs a tail only.
    assert summary(plan_of(match, parse_reuse("replay"))) == (1000, 64, "carried", 600)
    everything = frozenset(range(63))
    match = match_of(1000, {600: EXACT}, lacking=everything)
    assert summary(plan_of(match, parse_reuse("replay"))) == (600, 0, "complete", 600)


def test_a_convolution_needs_no_more_than_its_field_after_an_anchor() -> None:
    plan = plan_of(match_of(1000, {990: EXACT}), parse_reuse("exact"), MIXED)
    assert (plan.tails, plan.start) == ((3, 10), Start.COMPLETE)
    plan = plan_of(match_of(1000, {999: EXACT}), parse_reuse("exact"), MIXED)
    assert plan.tails == (1, 1)


def test_a_plan_without_reuse_has_no_anchor() -> None:
    plan = without_reuse(plan_of(match_of(1000, {500: EXACT}), parse_reuse("replay")), "load_failed")
    assert (plan.anchor, plan.start, plan.provenance) == (None, Start.COMPLETE, EXACT)


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.integers(1, 400),
    anchors=st.dictionaries(
        st.integers(1, 400), st.sampled_from([EXACT, EXACT, Provenance(0, True), ZERO_START]), max_size=6
    ),
    pages=st.sampled_from([EXACT, EXACT, Provenance(0, True), ZERO_START]),
    lacking=st.frozensets(st.integers(0, 25)),
    reuse=st.sampled_from(
        [
            parse_reuse("exact"),
            *(
                parse_reuse("replay", ratio, 4, start)
                for ratio in (0.05, 0.3, 1.0)
                for start in ("zero", "anchor", "carried")
            ),
            parse_reuse("replay", 0.1, 0, reuse_approximate="never"),
        ]
    ),
)
def test_a_plan_can_be_carried_out_and_says_the_truth(
    tokens: int, anchors: dict[int, Provenance], pages: Provenance, lacking: frozenset[int], reuse: Reuse
) -> None:
    if not reuse.terms.take(pages):
        pages = EXACT  # such pages would not have been matched
    anchors = {position: provenance for position, provenance in anchors.items() if position <= tokens}
    plan = plan_of(match_of(tokens, anchors, pages, lacking), reuse)
    m, start = plan.matched, plan.tail_start
    if not m:
        return
    # Its hiddens are there.
    assert all(page not in lacking for page in range(start // PAGE, -(-m // PAGE)) if start < m)
    # Its states are usable, and lie where the tail begins if nothing is neglected.
    begins = 0
    if plan.anchor is not None:
        begins = plan.anchor.position
        assert begins <= start
        assert reuse.terms.take(plan.anchor.provenance)
        assert reuse.start != "zero" or reuse.mode == "exact"
    assert (plan.start is Start.COMPLETE) == (begins == start)
    assert (plan.start is Start.CARRIED) == (0 < begins < start)
    # What it says of the result is what the oracle says.
    behind = pages if plan.anchor is None else pages.worst(plan.anchor.provenance)
    assert plan.provenance == behind.after(plan.start)
    assert plan.exact is (begins == start and behind == EXACT)
    # Exact mode: no longer hit, and no shorter replay of it, would have been exact.
    if reuse.mode == "exact":
        assert plan.exact
        usable = [0, *(position for position, provenance in anchors.items() if provenance == EXACT)]
        ways = {
            (end, end - begin)
            for end in range(1, tokens + 1)
            for begin in usable
            if begin <= end
            and all(page not in lacking for page in range(begin // PAGE, -(-end // PAGE)) if begin < end)
        }
        longest = max(end for end, _ in ways)
        assert (m, plan.replayed) == (longest, min(replay for end, replay in ways if end == longest))


@pytest.mark.parametrize(("given_", "depth"), [(None, None), ("always", None), ("never", 0), (0, 0), (3, 3)])
def test_policies_of_approximate_pages(given_: object, depth: int | None) -> None:
    assert parse_reuse("replay", reuse_approximate=given_).terms == Terms(depth)
    assert parse_reuse("exact", reuse_approximate=given_).terms == ONLY_EXACT


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"start": "warm"}, "The start must be one of zero, anchor, carried"),
        ({"mode": "exact", "start": "zero"}, "A start goes with mode 'replay' only"),
        ({"reuse_approximate": "sometimes"}, "must be 'always', 'never' or a number of replays"),
        ({"reuse_approximate": -1}, "must be 'always', 'never' or a number of replays"),
        ({"reuse_approximate": True}, "must be 'always', 'never' or a number of replays"),
    ],
)
def test_unknown_wishes_get_one_sentence(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        parse_reuse(**{"mode": "replay", **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize("given_", [-16, 8, 17, True, "16"])
def test_intervals_are_multiples_of_sixteen(given_: object) -> None:
    with pytest.raises(InvalidRequestError, match="multiple of 16"):
        check_interval(given_)
    assert check_interval(512) == 512


@pytest.mark.parametrize(
    ("anchors", "stop", "worth"),
    [
        ({990: EXACT}, "diverged", True),
        ({990: EXACT}, "end", False),
        ({936: EXACT}, "end", True),
        ({1000: EXACT}, "diverged", False),
        ({500: EXACT}, "diverged", False),  # carried: these are not the states of a full prefill
    ],
)
def test_states_are_worth_an_anchor_where_others_are_likely_to_come(
    anchors: dict[int, Provenance], stop: str, worth: bool
) -> None:
    match = match_of(1000, anchors)
    plan = plan_of(Match(match.tokens, match.pages, stop, match.anchors), parse_reuse("replay"))
    assert plan.worth_saving is worth
