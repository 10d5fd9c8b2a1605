"""Hits that begin with a saved state, inside a vLLM engine: against cold runs, and against a replay token by token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tailreplay.engines.vllm.messages import Load
from tailreplay.engines.vllm.plugin import tapped_model
from tailreplay.engines.vllm.replay import Tail, replay
from tests.vllm_live.conftest import Engine, Finished, error

DRAW = random.Random(11)
BASE = [DRAW.randrange(3, 1000) for _ in range(2600)]
CHUNK = 640
OTHER = [5, 6, 7]


def after(m: int) -> list[int]:
    """A prompt that shares exactly m tokens with `BASE`."""
    return [*BASE[:m], 3 + (BASE[m] - 2) % 997]


def tokens(count: int) -> list[int]:
    return [DRAW.randrange(3, 1000) for _ in range(count)]


@pytest.fixture(scope="module")
def stored(slow_model: Path) -> Iterator[Engine]:
    """An engine with `BASE` in its cache, computed in chunks."""
    running = Engine(slow_model, host_bytes="96MiB", min_match=1)
    running.run(BASE, chunk=CHUNK, mode="off")
    running.run(OTHER, mode="off", store=False)  # a step in which the last page lands
    yield running
    running.close()


def no_pins(engine: Engine) -> bool:
    catalog = engine.deciding.catalog
    pages = [*catalog.resident(), *catalog._roots.values()]
    held = [anchor for page in pages for anchor in page.anchors or ()]
    return catalog.pinned == 0 and all(anchor.ready and not anchor.pins for anchor in held)


@pytest.mark.parametrize("m", [CHUNK, 4 * CHUNK, *sorted(random.Random(2).sample(range(CHUNK, len(BASE)), 4))])
def test_an_exact_hit_replays_what_follows_the_last_anchor(stored: Engine, m: int) -> None:
    prompt = after(m)
    cold = stored.run(prompt, mode="off", store=False)
    other = stored.run(prompt, chunk=max(16, m // 3), mode="off", store=False)
    hit = stored.run(prompt, mode="exact", store=False)
    assert hit.cached == hit.report["matched"] == m
    assert hit.report["anchor"] == m // CHUNK * CHUNK
    assert hit.report["replayed"] == m - hit.report["anchor"]
    assert (hit.report["start"], hit.report["exact"], hit.report["depth"]) == ("complete", True, 0)
    assert error(hit, cold) < max(2 * error(other, cold), 0.02)
    assert no_pins(stored)


def test_ten_turns_of_exact_hits_stay_at_the_noise_floor(stored: Engine) -> None:
    ids = tokens(400)
    for turn in range(10):
        done = stored.run(ids, max_tokens=6, mode="exact")
        assert done.report["exact"]
        if turn:
            # All but the last sampled token and what the user says.
            assert (done.report["matched"], done.report["replayed"]) == (len(ids) - 41, 0)
        stored.run(OTHER, mode="off", store=False)
        ids = [*ids, *done.tokens, *tokens(40)]
    cold = stored.run(ids, mode="off", store=False)
    other = stored.run(ids, chunk=len(ids) // 3, mode="off", store=False)
    assert error(stored.run(ids, mode="exact", store=False), cold) < max(2 * error(other, cold), 0.02)


def test_a_branch_that_was_replayed_once_is_not_replayed_again(stored: Engine) -> None:
    m = 3 * CHUNK + 100
    stored.run([*BASE[:m], *tokens(30)], mode="exact")
    third = [*BASE[:m], *tokens(30)]
    hit = stored.run(third, mode="exact", store=False)
    assert (hit.report["matched"], hit.report["replayed"]) == (m, 0)
    assert error(hit, stored.run(third, mode="off", store=False)) < 0.02


def test_a_carried_state_is_the_anchors_and_what_the_tail_makes_of_it(stored: Engine) -> None:
    m, tail = 1200, 240
    prompt = [*BASE[:m], 9]
    loads: list[Load] = []
    states: list[dict[str, list[Any]]] = []

    def note(load: Load) -> None:
        loads.append(load)
        states.append(stored.worker.states.read(load.states))
        if len(loads) == 1:
            states.append(_token_by_token(stored, load))

    stored.worker.observer = note
    try:
        hit = stored.run(prompt, mode="replay", ratio=tail / m, store=False)
        zero = stored.run(prompt, mode="replay", ratio=tail / m, start="zero", store=False)
    finally:
        stored.worker.observer = None
    assert (hit.report["start"], hit.report["anchor"], hit.report["replayed"]) == ("carried", CHUNK, tail)
    assert (hit.report["exact"], hit.report["depth"]) == (False, 1)
    assert (zero.report["start"], zero.report["anchor"]) == ("zero", None)
    carried, oracle, zeros = (Finished([], 0, {}, each) for each in states)
    assert error(carried, oracle) < 0.03
    assert error(zeros, oracle) > 0.1
    cold = stored.run(prompt, mode="off", store=False)
    assert error(hit, cold) < error(zero, cold)


def _token_by_token(engine: Engine, load: Load) -> dict[str, list[Any]]:
    """The anchor's states, and one token of the tail after the other, in the blocks of `load`."""
    worker = engine.worker
    kept = [state.clone() for state in worker.states.views(load.states)]
    saved = [torch.empty_like(state) for state in kept]
    worker.anchors.arena.read(load.anchor, saved)
    for state, value in zip(worker.states.views(load.states), saved, strict=True):
        state.copy_(value)
    for at in range(load.tail):
        one = replace(load, matched=load.matched - load.tail + at + 1, tail=1, tail_ids=load.tail_ids[at : at + 1])
        replay(tapped_model(), worker.states, [Tail(one, 0, 1)], worker.store.hidden, torch.device("cpu"))
    found = worker.states.read(load.states)
    for state, value in zip(worker.states.views(load.states), kept, strict=True):
        state.copy_(value)
    return found


def test_hits_with_and_without_anchors_share_batches_and_steps(stored: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tails longer than a step's share, zero tails among them: each gets the states that it gets alone."""
    from vllm import SamplingParams

    lengths = {"a": 2 * CHUNK - 7, "b": 500, "c": CHUNK, "d": 2500}  # 500 lies before the first anchor
    found: dict[str, Finished] = {}

    def note(load: Load) -> None:
        found[load.request[0]] = Finished([], 0, {}, stored.worker.states.read(load.states))

    stored.worker.observer = note
    try:
        with monkeypatch.context() as patch:
            patch.setattr(stored.deciding._pacer, "_most", 300)
            core = stored.llm.llm_engine
            extra = {"kv_transfer_params": {"tailreplay": {"mode": "exact", "store": False}}}
            for name, m in lengths.items():
                params = SamplingParams(max_tokens=1, temperature=0, extra_args=extra)
                core.add_request(name, {"prompt_token_ids": after(m)}, params)
            while core.has_unfinished_requests():
                core.step()
    finally:
        stored.worker.observer = None
    assert set(found) == set(lengths)
    for name, m in lengths.items():
        cold = stored.run(BASE[:m], mode="off", store=False)
        assert error(found[name], cold) < 0.03, name


def test_a_damaged_anchor_is_computed_again_and_not_used_any_more(stored: Engine) -> None:
    prompt = tokens(500)
    stored.run(prompt, mode="off")
    stored.run(OTHER, mode="off", store=False)
    longer = [*prompt, 4]
    seen: list[Load] = []
    stored.worker.observer = seen.append
    try:
        assert stored.run(longer, mode="exact", store=False).report["anchor"] == 500
        arena = stored.worker.anchors.arena
        arena._arena.rows(arena.parts[0], seen[-1].anchor, 1).bitwise_not_()
        failed = stored.run(longer, mode="exact", store=False)
        assert failed.report["miss_reason"] == "load_failed"
        cold = stored.run(longer, mode="off", store=False)
        assert error(failed, cold) < 0.02
        assert stored.deciding.counts["damaged_anchors"] == 1
        hit = stored.run(longer, mode="exact", store=False)
    finally:
        stored.worker.observer = None
    assert (hit.report["matched"], hit.report["anchor"]) == (500, None)
    assert error(hit, cold) < 0.05
    assert no_pins(stored)


def test_states_that_cannot_be_saved_are_counted_out_and_hold_nothing(
    stored: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = stored.deciding.catalog.anchors.used
    prompt = tokens(300)

    def broken(*_: Any) -> None:
        raise ValueError("not a number")

    with monkeypatch.context() as patch:
        patch.setattr(stored.worker.anchors.arena, "write", broken)
        stored.run(prompt, max_tokens=3, mode="off")
        stored.run(OTHER, mode="off", store=False)
    assert stored.deciding.catalog.anchors.used == used
    hit = stored.run([*prompt, 4], mode="exact", store=False)
    assert (hit.report["matched"], hit.report["anchor"]) == (300, None)
    assert no_pins(stored)


def test_a_preempted_request_leaves_and_finds_whole_anchors(stored: Engine) -> None:
    from vllm import SamplingParams

    prompt = tokens(1500)
    core, seen = stored.llm.llm_engine, dict[str, Any]()
    connector = stored.scheduler.connector
    original = connector.request_finished_all_groups

    def finished(request: Any, blocks: Any) -> Any:
        where = stored.geometry.state_blocks(blocks, request.num_computed_tokens)
        seen["states"], seen["seen"] = stored.read_states(where), request.num_computed_tokens
        return original(request, blocks)

    extra = {"kv_transfer_params": {"tailreplay": {"mode": "exact"}}}
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, extra_args=extra)
    connector.request_finished_all_groups = finished
    loads: list[Load] = []
    stored.worker.observer = loads.append
    stored.scheduler.max_num_scheduled_tokens, whole = 600, stored.scheduler.max_num_scheduled_tokens
    try:
        core.add_request("preempted", {"prompt_token_ids": prompt}, params)
        steps, out = 0, []
        while core.has_unfinished_requests():
            out += core.step()
            steps += 1
            if steps in (2, 6):
                assert stored.scheduler.reset_prefix_cache(reset_running_requests=True)
    finally:
        stored.scheduler.max_num_scheduled_tokens = whole
        connector.request_finished_all_groups = original
        stored.worker.observer = None
    assert len(loads) == 2, "it began again twice, each time with what it had stored"
    assert all(load.anchor >= 0 for load in loads)
    ids = [*prompt, *out[-1].outputs[0].token_ids][: seen["seen"]]
    cold = stored.run(ids, mode="off", store=False)
    assert error(Finished([], 0, {}, seen["states"]), cold) < 0.03
    stored.run(OTHER, mode="off", store=False)
    assert no_pins(stored)
    hit = stored.run([*ids, 4], mode="exact", store=False)
    assert (hit.report["matched"], hit.report["replayed"]) == (len(ids), 0)
    assert error(hit, stored.run([*ids, 4], mode="off", store=False)) < 0.03
