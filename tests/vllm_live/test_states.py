"""States after a hit against those of a cold run, inside a vLLM engine."""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tailreplay.engines.vllm import options, worker
from tailreplay.engines.vllm.namespaces import namespace_of
from tailreplay.keys import token_bytes
from tests.vllm_live.conftest import Engine, Finished, error

RANDOM = random.Random(0)
BASE = [RANDOM.randrange(3, 1000) for _ in range(2900)]


def after(m: int) -> list[int]:
    """A prompt that shares exactly m tokens with `BASE`."""
    return [*BASE[:m], 3 + (BASE[m] - 2) % 997]


@pytest.fixture(scope="module")
def stored(engine: Engine) -> Engine:
    """The engine with `BASE` in its cache."""
    engine.run(BASE, mode="off")
    engine.run([5, 6, 7], mode="off", store=False)  # a step in which the last page lands
    return engine


def prefix(stored: Engine, name: str) -> int:
    return {"B-1": stored.block - 1, "B": stored.block, "B+1": stored.block + 1}.get(name) or int(name)


@pytest.mark.parametrize("name", ["33", "B-1", "B", "B+1", "777", "2817"])
def test_an_exact_hit_has_the_states_of_a_cold_run(stored: Engine, name: str) -> None:
    m = prefix(stored, name)
    prompt = after(m)
    cold = stored.run(prompt, mode="off", store=False)
    other = stored.run(prompt, chunk=max(16, m // 3), mode="off", store=False)
    hit = stored.run(prompt, mode="exact", store=False)
    assert hit.cached == hit.report["matched"] == m
    assert hit.report["replayed"] == m - (hit.report["anchor"] or 0)
    assert hit.report["exact"]
    # The noise floor: cold against cold with other chunks. What little it is below one step's rounding does not count.
    assert error(hit, cold) < max(2 * error(other, cold), 0.02)


def test_a_replayed_hit_is_closer_the_more_it_replays(stored: Engine) -> None:
    prompt = after(2000)
    cold = stored.run(prompt, mode="off", store=False)
    zero = stored.run(prompt, mode="zero")
    hits = [stored.run(prompt, mode="replay", ratio=ratio, start="zero", store=False) for ratio in (0.05, 0.3, 1.0)]
    assert [hit.report["replayed"] for hit in hits] == [100, 600, 2000]
    assert [hit.report["exact"] for hit in hits] == [False, False, True]
    errors = [error(zero, cold), *(error(hit, cold) for hit in hits)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.3
    assert errors[-1] < 0.05


def test_a_tail_longer_than_a_steps_budget_goes_on_in_the_next(stored: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = after(1500)
    whole = stored.run(prompt, mode="exact", store=False)
    monkeypatch.setattr(stored.deciding._pacer, "_most", 400)
    parts = stored.run(prompt, mode="exact", store=False)
    assert parts.report["replayed"] == 1500
    assert error(parts, whole) < 0.05


def test_generated_tokens_are_reused_and_stay_exact(stored: Engine) -> None:
    prompt = [*BASE[:300], 7, 8, 9]
    answer = stored.run(prompt, max_tokens=40, mode="exact")
    stored.run([5, 6, 7], mode="off", store=False)
    longer = [*prompt, *answer.tokens, 11]
    hit = stored.run(longer, mode="exact", store=False)
    # The last sampled token was never computed.
    assert hit.report["matched"] == len(prompt) + 39
    cold = stored.run(longer, mode="off", store=False)
    assert error(hit, cold) < 0.05


def test_what_follows_an_approximate_hit_is_approximate(stored: Engine) -> None:
    block = stored.block
    prompt = [*BASE[: 2 * block], *(3 + i % 900 for i in range(block + 20))]
    first = stored.run(prompt, mode="replay", ratio=0.1, start="zero")
    assert not first.report["exact"]
    stored.run([5, 6, 7], mode="off", store=False)
    longer = [*prompt, 4]
    assert stored.run(longer, mode="replay", store=False).report["matched"] == len(prompt)
    exact = stored.run(longer, mode="exact", store=False)
    assert exact.report["matched"] == 2 * block
    assert exact.report["exact"]


def test_salts_are_kept_apart(stored: Engine) -> None:
    # A salt is vLLM's own request field, part of the prompt.
    ids = after(500)
    assert stored.run(ids, mode="replay", store=False).report["matched"] == 500
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0)
    (out,) = stored.llm.generate([{"prompt_token_ids": ids, "cache_salt": "tenant"}], params, use_tqdm=False)
    assert out.num_cached_tokens == 0


def test_a_load_that_fails_is_recomputed(
    stored: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = after(700)
    cold = stored.run(prompt, mode="off", store=False)

    def broken(*_: Any) -> None:
        raise RuntimeError("the page is gone")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(stored.worker.store.arena, "read", broken)
        failed = stored.run(prompt, mode="exact", store=False)
    assert failed.report["miss_reason"] == "load_failed"
    assert failed.report["matched"] == 0
    assert error(failed, cold) < 0.02
    assert stored.deciding.catalog.pinned == 0
    assert stored.run(prompt, mode="exact", store=False).report["matched"] == 700


def test_a_store_that_fails_is_counted_and_nothing_is_matched(stored: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [9, 8, 7, *BASE[:1200]]
    pages = stored.deciding.catalog.pages

    def broken(*_: Any) -> None:
        raise RuntimeError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(stored.worker.store.arena, "write", broken)
        stored.run(prompt, mode="off")
        stored.run([5, 6, 7], mode="off", store=False)
    assert stored.deciding.catalog.pages == pages
    assert stored.deciding.catalog.pinned == 0
    assert stored.run([*prompt, 4], mode="exact", store=False).report["miss_reason"] == "unseen_prefix"


def test_wrong_parameters_are_ignored_with_one_warning(stored: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings = []
    monkeypatch.setattr(options.log, "warning", lambda *args: warnings.append(args))
    monkeypatch.setattr(stored.deciding._asked, "_warned", False)
    for _ in range(2):
        assert stored.run(after(600), mode="sometimes").report["mode"] == "replay"
    assert len(warnings) == 1
    assert "'sometimes'" in warnings[0][0] % warnings[0][1:]


def test_hits_at_once_are_replayed_in_one_batch(stored: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tails of different lengths, one longer than its share of a step: each gets the states that it gets alone."""
    from vllm import SamplingParams

    batches: list[list[int]] = []
    states: dict[str, Finished] = {}
    original = worker.replay

    def counted(model: Any, states: Any, tails: Any, *rest: Any) -> None:
        batches.append([tail.count for tail in tails])
        original(model, states, tails, *rest)

    monkeypatch.setattr(worker, "replay", counted)
    monkeypatch.setattr(stored.deciding._pacer, "_most", 1000)
    lengths = {"a": 300, "b": 33, "c": 777, "d": stored.block}

    def note(load: Any) -> None:
        states[load.request[0]] = Finished([], 0, {}, stored.worker.states.read(load.states))

    stored.worker.observer = note
    core = stored.llm.llm_engine
    # States that other tests have saved would shorten the tails.
    options: dict[str, Any] = {"mode": "replay", "ratio": 1.0, "start": "zero", "store": False}
    extra = {"kv_transfer_params": {"tailreplay": options}}
    for name, m in lengths.items():
        params = SamplingParams(max_tokens=1, temperature=0, extra_args=extra)
        core.add_request(name, {"prompt_token_ids": after(m)}, params)
    while core.has_unfinished_requests():
        core.step()
    stored.worker.observer = None
    # The budget of 1000 takes a, b and most of c in the first step; the rest goes on in the next.
    assert batches == [[300, 33, 667], [110, stored.block]]
    for name, m in lengths.items():
        stored.worker.observer = note
        stored.run(after(m), **options)
        stored.worker.observer = None
        (alone,) = (states.pop(key) for key in set(states) - set(lengths))
        assert error(states[name], alone) < 0.05


def test_a_page_that_changed_in_memory_is_computed_again(stored: Engine) -> None:
    prompt = [4, 4, 4, *BASE[:1200]]
    stored.run(prompt, mode="off")
    stored.run([5, 6, 7], mode="off", store=False)
    longer = [*prompt, 9]
    cold = stored.run(longer, mode="off", store=False)
    page = stored.deciding.catalog.match(token_bytes(longer), _namespace(stored), limit=1203).pages[1]
    arena = stored.worker.store.arena
    part = arena.layout.kv[0][0]
    arena.write(part, [page.slot], torch.ones(1, *part.shape).to(part.dtype))
    damaged = stored.deciding.counts["damaged_pages"]
    hit = stored.run(longer, mode="exact")
    assert hit.report["miss_reason"] == "load_failed"
    assert error(hit, cold) < 0.02
    assert stored.deciding.counts["damaged_pages"] == damaged + 1
    stored.run([5, 6, 7], mode="off", store=False)
    again = stored.run([*longer, 8], mode="exact", store=False)
    assert again.report["matched"] == len(longer), "the page was written again"
    assert error(again, stored.run([*longer, 8], mode="off", store=False)) < 0.05
    assert stored.deciding.catalog.pinned == 0


def _namespace(stored: Engine) -> Any:
    request = SimpleNamespace(lora_request=None, mm_features=[], cache_salt=None)
    return namespace_of(request, stored.deciding._model_now, stored.geometry)


def test_taps_are_buffers_of_the_model_that_vllm_profiles(stored: Engine) -> None:
    model = stored.worker._model
    buffers = {name: buffer for name, buffer in model.decoder.named_buffers() if name.endswith("tailreplay_tap")}
    assert len(buffers) == len(model.taps) == len(model.topology.stored_groups)
    assert all(any(buffer is tap for tap in model.taps) for buffer in buffers.values())
    assert all(tap.shape == (2048, stored.geometry.d_model) for tap in model.taps)
