"""Anchors in the transformers engine: exact at any token, carried where asked, never called what they are not."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from tailreplay import HybridLM, PrefixCache, Reuse
from tailreplay.engines.transformers import compat
from tailreplay.engines.transformers.capture import Sink
from tailreplay.engines.transformers.replay import replay
from tailreplay.engines.transformers.results import Timings
from tailreplay.engines.transformers.sequence import Sequence
from tailreplay.modes import parse_reuse
from tailreplay.plan import ReplayPlan
from tailreplay.provenance import Start
from tailreplay.storage import Storage
from tests.engine.test_families import TOLERANCE, prefill, relative, state_errors
from tests.engine.tiny_models import CONFIGS, random_ids, tiny_model

CHUNK = 48
OFF = parse_reuse("off")
EXACTLY = parse_reuse("exact")


@pytest.fixture(scope="module", params=CONFIGS)
def lm(request: pytest.FixtureRequest) -> HybridLM:
    return HybridLM(tiny_model(request.param), cache=PrefixCache("64MiB", 16), prefill_chunk=CHUNK, min_tail=8)


@pytest.fixture
def fresh() -> HybridLM:
    return HybridLM(tiny_model("qwen3_5"), cache=PrefixCache("32MiB", 16), prefill_chunk=CHUNK, min_tail=8)


def restore(lm: HybridLM, ids: list[int], reuse: Reuse, salt: str = "") -> tuple[Sequence, ReplayPlan]:
    with lm.lock:
        sequence, plan = lm.begin(ids, reuse, lm.namespace(salt), len(ids), False, Timings())
        sequence.wait_loaded()
        lm.cache.release(plan)
    return sequence, plan


def floor(lm: HybridLM, ids: list[int]) -> tuple[Sequence, float]:
    """True states after `ids`, and how far another chunking is from them."""
    true, _ = prefill(lm, ids, store=False)
    other, _ = prefill(lm, ids, chunk=37, store=False)
    return true, max(*state_errors(lm, other, true), TOLERANCE / 4)


def _replay_captured(lm: HybridLM, sequence: Sequence, ids: list[int], tail: int) -> None:
    """Replay the last hiddens of a plain prefill of `ids` on top of a sequence's states."""
    captured = Sequence(lm.backbone, lm.cache, lm.namespace(), 200, store=False)
    sink: Sink = [[] for _ in lm.backbone.topology.stored_groups]
    lm.backbone.forward(ids, 0, captured.past, sink)
    tails = [min(tail, group.receptive_field or tail) for group in lm.backbone.topology.groups]
    replay(lm.backbone, sequence.past, ids, tails, lambda group, start, stop: sink[group][0][None, start:stop])


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(m=st.integers(1, 219), seed=st.integers(0, 3))
def test_exact_mode_is_exact_at_any_token_and_replays_from_the_last_anchor(lm: HybridLM, m: int, seed: int) -> None:
    salt = f"exact {seed}"
    ids = random_ids(200, seed=seed)
    answer = lm.generate(ids, max_new_tokens=21, replay="off", salt=salt).tokens
    known = [*ids, *answer][:220]
    sequence, plan = restore(lm, [*known[:m], (known[m] + 1) % 50 if m < 220 else 3, 7], EXACTLY, salt)
    true, noise = floor(lm, known[:m])
    anchors = [0, 48, 96, 144, 192, 200, 220]
    begins = max(position for position in anchors if position <= m)
    assert (plan.matched, plan.exact, plan.provenance.is_exact) == (m, True, True)
    assert plan.replayed == max(
        (min(m - begins, group.receptive_field or m) for group in lm.backbone.topology.groups), default=0
    )
    assert max(state_errors(lm, sequence, true)) <= 4 * noise


def test_ten_turns_of_hits_stay_exact(lm: HybridLM) -> None:
    rng = random.Random(5)
    ids, known = random_ids(90, seed=9), 0
    for turn in range(10):
        result = lm.generate(ids, max_new_tokens=5, salt="turns")  # the default mode
        assert result.reuse.exact
        if turn:
            assert (result.reuse.matched, result.reuse.replayed) == (known, 0)
            assert result.reuse.anchor == known
        ids = [*ids, *result.tokens]
        known = len(ids) - 1
        ids += [rng.randrange(3, 50) for _ in range(9)]
    sequence, plan = restore(lm, [*ids[:known], 1, 2], EXACTLY, "turns")
    assert plan.matched == known
    true, noise = floor(lm, ids[:known])
    assert max(state_errors(lm, sequence, true)) <= 4 * noise


def test_a_carried_start_is_the_replay_of_the_tail_from_the_anchor_s_states(lm: HybridLM) -> None:
    ids = random_ids(190, seed=4)
    lm.generate(ids, max_new_tokens=1, replay="off", salt="carried")
    sequence, plan = restore(lm, [*ids[:180], 1], parse_reuse("replay", 0.05, 8), "carried")
    if all(group.receptive_field for group in lm.backbone.topology.groups):
        assert (plan.start, plan.exact) == (Start.COMPLETE, True), "convolutions are rebuilt wholly by any tail"
        return
    assert (plan.matched, plan.replayed, plan.start) == (180, 9, Start.CARRIED)
    assert plan.anchor is not None
    assert plan.anchor.position == 144
    # The oracle: states of a plain prefill of 144 tokens, then the hiddens of a plain prefill of all.
    before, _ = prefill(lm, ids[:144], store=False)
    expected = Sequence(lm.backbone, lm.cache, lm.namespace(), 200, store=False)
    compat.copy_states(before.past, expected.past)
    with torch.inference_mode():
        _replay_captured(lm, expected, ids[:180], 9)
    assert max(state_errors(lm, sequence, expected)) < TOLERANCE
    assert plan.provenance.start is Start.CARRIED


def test_the_mean_state_takes_the_place_of_zero_states_and_is_mixed_with_an_anchor_s(lm: HybridLM) -> None:
    finite = all(group.receptive_field for group in lm.backbone.topology.groups)
    try:
        assert lm.make_mean_state(random_ids(400, seed=1))
        assert lm.mean is not None
        ids = random_ids(190, seed=4)
        lm.generate(ids, max_new_tokens=1, replay="off", salt="mean")
        mixed, plan = restore(lm, [*ids[:180], 1], parse_reuse("replay", 0.05, 8), "mean")
        if finite:
            assert (plan.start, plan.exact) == (Start.COMPLETE, True), "convolutions are rebuilt wholly by any tail"
            return
        assert (plan.start, plan.anchor.position if plan.anchor else None) == (Start.MIXED, 144)
        alone, plan = restore(lm, [*ids[:40], 1], parse_reuse("replay", 0.05, 8), "mean")
        assert (plan.matched, plan.start, plan.anchor, plan.exact) == (40, Start.MEAN, None, False)
        for sequence, anchor, end in ((mixed, 144, 180), (alone, 0, 40)):
            expected = Sequence(lm.backbone, lm.cache, lm.namespace(), 200, store=False)
            views = lm.backbone.states.make(expected.past, lm.backbone.device)
            before, _ = prefill(lm, ids[:anchor], store=False) if anchor else (None, None)
            saved = lm.backbone.states.read(before.past) if before is not None else None
            for index, (view, mean) in enumerate(zip(views, lm.mean, strict=True)):
                view.copy_(mean)
                if saved is not None:
                    recurrent = lm.backbone.states.recurrent[index]
                    view.copy_((saved[index] + mean) / 2 if recurrent else saved[index])
            with torch.inference_mode():
                _replay_captured(lm, expected, ids[:end], 9 if anchor else 8)
            assert max(state_errors(lm, sequence, expected)) < TOLERANCE
        paper = parse_reuse("replay", 0.05, 8, "zero")
        for baseline in (paper, parse_reuse("zero")):
            assert restore(lm, [*ids[:40], 1], baseline, "mean")[1].start is Start.ZERO
    finally:
        lm.mean = None


def test_a_mean_state_is_given_up_when_somebody_waits_and_gone_with_the_weights(fresh: HybridLM) -> None:
    assert not fresh.make_mean_state(), "without a tokenizer there is no text"
    assert not fresh.make_mean_state(random_ids(400), waits=lambda: True)
    assert not fresh.make_mean_state(random_ids(100)), "too short"
    assert fresh.make_mean_state(random_ids(400))
    fresh.refresh()
    assert fresh.mean is None


def test_zero_start_is_still_to_be_had(fresh: HybridLM) -> None:
    ids = random_ids(190, seed=4)
    fresh.generate(ids, max_new_tokens=1, replay="off")
    query = [*ids[:180], 1]
    paper = fresh.generate(query, max_new_tokens=1, replay=parse_reuse("replay", 0.05, 8, "zero"), store=False)
    assert (paper.reuse.start, paper.reuse.anchor, paper.reuse.depth) == ("zero", None, 1)
    carried = fresh.generate(query, max_new_tokens=1, replay=0.05, store=False)
    assert (carried.reuse.start, carried.reuse.anchor, carried.reuse.depth) == ("carried", 144, 1)


def test_an_interval_saves_more_often(fresh: HybridLM) -> None:
    ids = random_ids(130, seed=4)
    fresh.anchor_interval = 32
    fresh.generate(ids, max_new_tokens=1)
    assert fresh.cache.stats().anchors == 5  # 32, 64, 96, 128, 130
    assert fresh.generate([*ids[:101], 1], max_new_tokens=1, replay="exact").reuse.replayed == 5


def test_a_branch_point_gets_an_anchor_when_a_second_request_leaves_there(fresh: HybridLM) -> None:
    ids = random_ids(130, seed=4)
    fresh.generate(ids, max_new_tokens=1)
    second = fresh.generate([*ids[:77], 1, 2, 3], max_new_tokens=1, replay="exact")
    assert (second.reuse.matched, second.reuse.replayed, second.reuse.anchor) == (77, 29, 48)
    third = fresh.generate([*ids[:77], 4, 5, 6], max_new_tokens=1, replay="exact")
    assert (third.reuse.matched, third.reuse.replayed, third.reuse.anchor) == (77, 0, 77)


def test_a_conversation_that_was_approximate_goes_on_without_getting_worse(fresh: HybridLM) -> None:
    document = random_ids(190, seed=4)
    fresh.generate(document, max_new_tokens=1)
    ids = [*document[:180], 1, 2]
    first = fresh.generate(ids, max_new_tokens=4)
    assert (first.reuse.depth, first.reuse.start) == (1, "carried")
    for _ in range(3):
        ids += [*first.tokens, 5, 6]
        first = fresh.generate(ids, max_new_tokens=4)
        # From the states that the turn before ended with: nothing is left out a second time.
        assert (first.reuse.replayed, first.reuse.depth, first.reuse.start) == (0, 1, "complete")
        assert not first.reuse.exact


def test_a_hit_inside_a_page_without_hiddens_is_one_and_stores_nothing(fresh: HybridLM) -> None:
    ids = random_ids(130, seed=4)
    fresh.generate(ids, max_new_tokens=1)
    tree = fresh.cache._catalog
    assert tree is not None
    for page in tree.resident():
        tree._room.strip(page)
    before = tree.pages
    hit = fresh.generate([*ids, *random_ids(70, seed=5)], max_new_tokens=2, replay="exact")
    assert (hit.reuse.matched, hit.reuse.replayed, hit.reuse.anchor) == (130, 0, 130)
    assert (tree.pages, tree.pinned) == (before, 0)


def test_states_that_are_damaged_are_not_used(fresh: HybridLM) -> None:
    ids = random_ids(130, seed=4)
    fresh.generate(ids, max_new_tokens=1)
    arena = fresh.cache._anchors
    assert arena is not None
    arena._arena._block.add_(1)
    again = fresh.generate([*ids, 1], max_new_tokens=1, replay="exact", store=False)
    assert (again.reuse.matched, again.reuse.replayed, again.reuse.anchor) == (130, 130, None)
    assert fresh.cache.stats().anchors == 0


def test_damaged_hiddens_that_need_no_replay_are_not_taken_along(fresh: HybridLM) -> None:
    ids = random_ids(137, seed=4)
    fresh.generate(ids, max_new_tokens=1)
    tree, arena = fresh.cache._catalog, fresh.cache._arena
    assert tree is not None
    assert arena is not None
    (page,) = (page for page in tree.resident() if page.start == 128)
    arena.rows(arena.layout.hidden[0], page.hidden_slot, 9).add_(1)
    longer = [*ids, *random_ids(30, seed=5)]
    # The anchor at the prompt's end needs none of them, but the page that is stored next would begin with them.
    again = fresh.generate(longer, max_new_tokens=1, replay="exact")
    assert (again.reuse.matched, again.reuse.anchor) == (128, 96)
    sequence, plan = restore(fresh, [*longer[:143], 3], EXACTLY)
    true, noise = floor(fresh, longer[:143])
    assert (plan.matched, plan.exact) == (143, True)
    assert max(state_errors(fresh, sequence, true)) <= 4 * noise


@pytest.mark.parametrize("layers", [3, 0])
def test_models_without_hiddens_store_after_a_hit_inside_a_page_and_use_anchors(layers: int) -> None:
    config = copy.deepcopy(tiny_model("qwen3_5").config)
    config.layer_types = ["linear_attention"] * layers + ["full_attention"]
    config.num_hidden_layers = layers + 1
    lm = HybridLM(AutoModelForCausalLM.from_config(config), cache=PrefixCache("8MiB", 16), prefill_chunk=48, min_tail=8)
    ids = random_ids(137, seed=4)
    lm.generate(ids, max_new_tokens=1)
    longer = [*ids[:130], *random_ids(30, seed=5)]
    hit = lm.generate(longer, max_new_tokens=1, replay="exact")
    assert (hit.reuse.matched, hit.reuse.anchor) == (130, 96 if layers else None)
    assert lm.generate([*longer, 3], max_new_tokens=1, replay="exact").reuse.matched == 160


def test_states_that_cannot_be_saved_do_not_spoil_an_answer(
    fresh: HybridLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr("tailreplay.tiers.anchor_arena.AnchorArena.write", fail)
    ids = random_ids(130, seed=4)
    result = fresh.generate(ids, max_new_tokens=2)
    assert len(result.tokens) == 2
    assert "Saving the states" in caplog.text
    assert (fresh.cache.stats().anchors, fresh.cache.stats().pages) == (0, 9)
    assert fresh.generate([*ids, 1], max_new_tokens=1).reuse.matched == 130


@pytest.mark.parametrize(("codec", "worst"), [("bf16", 0.01), ("int8", 0.02)])
def test_coded_anchors_are_smaller_and_never_called_exact(codec: str, worst: float) -> None:
    cache = PrefixCache("32MiB", 16, storage=Storage(anchor_codec=codec))
    lm = HybridLM(tiny_model("qwen3_5"), cache=cache, prefill_chunk=CHUNK, min_tail=8)
    ids = random_ids(130, seed=4)
    lm.generate(ids, max_new_tokens=1)
    sequence, plan = restore(lm, [*ids, 1], parse_reuse("replay", 0.1, 8))
    assert (plan.matched, plan.start, plan.exact, str(plan.provenance)) == (130, Start.COMPLETE, False, "quantised")
    true, _ = prefill(lm, ids, store=False)
    assert 0 < max(state_errors(lm, sequence, true)) < worst
    exact = lm.generate([*ids, 1], max_new_tokens=1, replay="exact", store=False)
    assert (exact.reuse.exact, exact.reuse.anchor, exact.reuse.replayed) == (True, None, 130)


def test_anchors_keep_to_their_bytes() -> None:
    one = HybridLM(tiny_model("qwen3_5"), cache=PrefixCache("8MiB")).backbone.layout.anchor_bytes
    cache = PrefixCache("32MiB", 16, storage=Storage(anchor_bytes=3 * one + 5))
    lm = HybridLM(tiny_model("qwen3_5"), cache=cache, prefill_chunk=32)
    for seed in range(4):
        lm.generate(random_ids(130, seed=seed), max_new_tokens=3)
        stats = cache.stats()
        assert stats.anchors <= stats.anchor_slots == 3
        assert stats.bytes_used <= stats.bytes_limit
    assert stats.anchor_evictions > 0


# ---- what is said is true


def _traffic(rng: random.Random, known: list[list[int]]) -> list[int]:
    """A prompt that goes on from some earlier sequence, from anywhere in it."""
    if not known or rng.random() < 0.15:
        return [rng.randrange(3, 50) for _ in range(rng.randrange(20, 120))]
    base = rng.choice(known)
    cut = rng.choice([len(base), len(base), rng.randrange(1, len(base) + 1)])
    return [*base[:cut], *(rng.randrange(3, 50) for _ in range(rng.randrange(1, 30)))][:400]


MODES = ["exact", 0.05, 0.05, 0.3, parse_reuse("replay", 0.05, 8, "zero"), parse_reuse("replay", 0.05, 8, "anchor"),
         parse_reuse("replay", 0.05, 8, reuse_approximate="never"), "off"]  # fmt: skip


def _claims(lm: HybridLM, rng: random.Random, count: int) -> Iterator[tuple[list[int], Reuse, ReplayPlan, Sequence]]:
    known: list[list[int]] = []
    for _ in range(count):
        ids = _traffic(rng, known)
        mode = rng.choice(MODES)
        reuse = (
            mode
            if isinstance(mode, Reuse)
            else parse_reuse(*(("replay", mode, 8) if isinstance(mode, float) else (mode,)))
        )
        sequence, plan = restore(lm, ids, reuse)
        yield ids, reuse, plan, sequence
        result = lm.generate(ids, max_new_tokens=rng.randrange(1, 8), replay=reuse)
        assert result.reuse.provenance == str(plan.provenance)
        known.append([*ids, *result.tokens])


@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 2**20))
@pytest.mark.parametrize("name", ["qwen3_5", "granitemoehybrid", "kimi_linear"])
def test_provenance_is_never_better_than_the_truth(name: str, seed: int) -> None:
    """Exact and approximate traffic mixed: whatever is called exact equals a full prefill."""
    lm = HybridLM(tiny_model(name), cache=PrefixCache("2MiB", 16), prefill_chunk=CHUNK, min_tail=8)
    said = {True: 0, False: 0}
    for _, reuse, plan, sequence in _claims(lm, random.Random(seed), 16):
        if not plan.matched:
            continue
        said[plan.exact] += 1
        assert plan.exact or reuse.mode != "exact"
        assert plan.provenance.depth <= (reuse.depth if reuse.depth is not None else 99) + (
            plan.start is not Start.COMPLETE
        )
        if plan.exact:
            true, noise = floor(lm, sequence.tokens)
            assert max(state_errors(lm, sequence, true)) <= 4 * noise
            # Its keys and values too: pages are what they are called.
            for got, want in zip(lm.backbone.kv(sequence.past), lm.backbone.kv(true.past), strict=True):
                for ours, theirs in zip(got.rows(0, plan.matched), want.rows(0, plan.matched), strict=True):
                    assert relative(ours, theirs) < TOLERANCE
    assert said[True]
