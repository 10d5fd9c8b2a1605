"""The model's mean state inside a vLLM engine: what it is, and what hits that begin with it are."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tailreplay.engines.vllm import worker
from tailreplay.engines.vllm.calibration import calibrate
from tailreplay.engines.vllm.messages import Load
from tailreplay.engines.vllm.plugin import tapped_model
from tailreplay.engines.vllm.replay import Tail, replay
from tests.vllm_live.conftest import Engine, Finished, error

DRAW = random.Random(12)
BASE = [DRAW.randrange(3, 1000) for _ in range(1300)]
TEXT = [DRAW.randrange(3, 1000) for _ in range(400)]
CHUNK, TAIL = 640, 96
OTHER = [5, 6, 7]


@pytest.fixture(scope="module")
def stored(slow_model: Path) -> Iterator[Engine]:
    """An engine with `BASE` in its cache, with an anchor after `CHUNK` tokens; it has no mean state yet."""
    running = Engine(slow_model, host_bytes="96MiB", min_match=1)
    running.run(BASE, chunk=CHUNK, mode="off")
    running.run(OTHER, mode="off", store=False)  # a step in which the last page lands
    yield running
    running.close()


def make_mean(engine: Engine, text: list[int] = TEXT) -> None:
    for _ in range(2):
        engine.run(text, calibrate=True)
    engine.run(OTHER, mode="off", store=False)


@pytest.fixture
def with_mean(stored: Engine) -> Engine:
    if not stored.worker.means.tag:
        make_mean(stored)
    return stored


def hit(engine: Engine, m: int, **options: Any) -> Finished:
    return engine.run([*BASE[:m], 3 + (BASE[m] - 2) % 997], mode="replay", ratio=TAIL / m, store=False, **options)


def mean_error(engine: Engine, text: list[int]) -> float:
    """How far the worker's mean is from that of the states of cold runs, for a text of 400 tokens."""
    cold = []
    for end in (256, 320, 384, 399):
        if engine.geometry.aligned_states:
            engine.llm.reset_prefix_cache()
        cold.append(engine.run(text[:end], mode="off", store=False).states)
    found: dict[str, list[torch.Tensor]] = {}
    for part, state in zip(engine.worker.states.parts, engine.worker.means.mean, strict=True):
        found.setdefault(part.name.rpartition(":")[0], []).append(state)
    mean = {
        name: [torch.stack([each[name][kind].float() for each in cold]).mean(0) for kind in range(2)] for name in found
    }
    return error(Finished([], 0, {}, found), Finished([], 0, {}, mean))


def test_it_is_the_mean_of_the_states_of_cold_runs(stored: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hit(stored, 500).report["start"] == "zero"
    assert hit(stored, 1200).report["start"] == "carried", "without a mean state"
    anchors, asked = stored.deciding.catalog.anchors.used, stored.deciding.counts["prompt_tokens"]
    with monkeypatch.context() as patch:
        patch.setattr(stored.deciding._pacer, "_most", 50)  # pieces are shorter than the distance between states
        make_mean(stored)
    assert stored.deciding.catalog.anchors.used == anchors, "nobody asks for its states"
    assert stored.deciding.counts["prompt_tokens"] == asked + len(OTHER)
    assert stored.deciding.counts["calibrations"] == 1
    assert mean_error(stored, TEXT) < 0.03
    dtypes = [part.dtype for part in stored.worker.states.parts]
    assert [state.dtype for state in stored.worker.means.mean] == dtypes
    assert stored.deciding.catalog.pinned == 0


@pytest.mark.parametrize(("m", "start"), [(500, "mean"), (1200, "mixed")])
def test_a_hit_begins_with_it_and_is_what_the_tail_makes_of_it(with_mean: Engine, m: int, start: str) -> None:
    stored, seen = with_mean, list[Any]()
    before = [state.clone() for state in stored.worker.means.mean]

    def note(load: Load) -> None:
        seen.append(stored.worker.states.read(load.states))
        if len(seen) == 1:
            seen.append(_token_by_token(stored, load))

    stored.worker.observer = note
    try:
        done = hit(stored, m)
        zero = hit(stored, m, start="zero")
    finally:
        stored.worker.observer = None
    assert (done.report["start"], done.report["anchor"]) == (start, CHUNK if start == "mixed" else None)
    assert (done.report["replayed"], done.report["exact"], done.report["depth"]) == (TAIL, False, 1)
    assert (zero.report["start"], zero.report["anchor"]) == ("zero", None)
    found, oracle, zeros = (Finished([], 0, {}, each) for each in seen)
    assert error(found, oracle) < 0.03
    assert error(zeros, oracle) > 0.1
    cold = stored.run([*BASE[:m], 3 + (BASE[m] - 2) % 997], mode="off", store=False)
    assert error(done, cold) < error(zero, cold)
    assert all(torch.equal(a, b) for a, b in zip(before, stored.worker.means.mean, strict=True)), (
        "hits do not change it"
    )


def _token_by_token(engine: Engine, load: Load) -> dict[str, list[torch.Tensor]]:
    """The states that a mean or mixed tail begins with, and one token of it after the other, in the blocks of `load`."""
    side = engine.worker
    views = side.states.views(load.states)
    kept, first = [state.clone() for state in views], [state.clone() for state in side.means.mean]
    if load.anchor >= 0:
        saved = [torch.empty_like(state) for state in kept]
        side.anchors.arena.read(load.anchor, saved)
        # A layer's states are its convolution's inputs and its recurrent state.
        first = [(a + b) / 2 if index % 2 else a for index, (a, b) in enumerate(zip(saved, first, strict=True))]
    for view, state in zip(views, first, strict=True):
        view.copy_(state)
    for at in range(load.tail):
        one = replace(load, matched=load.matched - load.tail + at + 1, tail=1, tail_ids=load.tail_ids[at : at + 1])
        replay(tapped_model(), side.states, [Tail(one, 0, 1)], side.store.hidden, torch.device("cpu"))
    found: dict[str, list[torch.Tensor]] = side.states.read(load.states)
    for view, state in zip(views, kept, strict=True):
        view.copy_(state)
    return found


def test_baselines_and_near_anchors_begin_as_before(with_mean: Engine) -> None:
    near = hit(with_mean, CHUNK + TAIL)
    assert (near.report["start"], near.report["exact"]) == ("complete", True)
    assert hit(with_mean, 1200, start="carried").report["start"] == "carried"
    assert with_mean.run([*BASE[:500], 9], mode="zero").report["start"] == "zero"


def test_one_that_fails_or_is_too_short_changes_nothing(with_mean: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    means = with_mean.worker.means
    tag, text = means.tag, TEXT[:320][::-1]
    with_mean.run(text, calibrate=True)

    def broken(*args: Any, **kwargs: Any) -> None:
        if args[2][0].done >= 256:
            raise RuntimeError("no room")
        replay(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(worker, "replay", broken)
        failed = with_mean.run(text, calibrate=True)
    assert failed.report["miss_reason"] == "load_failed"
    make_mean(with_mean, BASE[700:900])
    assert (means.tag, means._making, with_mean.deciding._lookup.has_mean) == (tag, {}, True)
    make_mean(with_mean, text)
    assert means.tag > tag


def test_a_reset_drops_it(with_mean: Engine) -> None:
    assert with_mean.llm.reset_prefix_cache(reset_connector=True)
    with_mean.run(BASE[:700], mode="off")
    with_mean.run(OTHER, mode="off", store=False)
    assert (with_mean.worker.means.tag, with_mean.worker.means.mean) == (0, [])
    assert hit(with_mean, 500).report["start"] == "zero"
    calibrate(with_mean.llm, "Some prose. " * 200)
    assert hit(with_mean, 500).report["start"] == "mean"
