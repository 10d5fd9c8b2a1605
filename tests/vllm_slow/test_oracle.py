"""Many mixed requests at once on an engine short of everything, with the states of every hit against an oracle.

The oracle of an exact hit is a cold run of the same tokens, alone; that of an approximate one the same replay, alone.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_live.conftest import Engine, Finished, error

REQUESTS = int(os.environ.get("TAILREPLAY_SOAK", "300"))
AT_ONCE = 8
DOCUMENTS = 60
OTHER = [5, 6, 7]


@dataclass
class Hit:
    """What a load left in the states."""

    ids: list[int]
    ratio: float
    exact: bool
    states: dict[str, list[Any]]


@dataclass
class Traffic:
    """What was sent and what came back."""

    hits: list[Hit] = field(default_factory=list)
    aborted: int = 0
    anchored: int = 0
    finished: int = 0
    resident: list[int] = field(default_factory=list)


@pytest.fixture(scope="module")
def engine(slow_model: Path) -> Iterator[Engine]:
    """Blocks for about four requests that run, and a store of two hundred pages."""
    arguments = {"num_gpu_blocks_override": 56, "max_num_seqs": AT_ONCE, "max_num_batched_tokens": 1024}
    running = Engine(slow_model, arguments, host_bytes="56MiB", min_match=16, max_replay_tokens_per_step=700)
    yield running
    running.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def drive(engine: Engine, draw: random.Random) -> Traffic:
    """Send `REQUESTS` requests, `AT_ONCE` at a time, and note the states after each load."""
    from vllm import SamplingParams

    documents = [[draw.randrange(3, 1000) for _ in range(draw.randrange(600, 2400))] for _ in range(DOCUMENTS)]
    traffic, core = Traffic(), engine.llm.llm_engine
    prompts: dict[str, tuple[list[int], dict[str, Any]]] = {}

    def loaded(load: Any) -> None:
        _, options = prompts[load.request.rsplit("-", 1)[0]]
        # After a preemption a request's own answer is part of what it matches.
        ids, plan = engine.deciding.loading(load.request)
        states = engine.worker.states.read(load.states)
        if plan is not None and all(page.provenance.is_exact for page in plan.pages):
            hit = Hit(ids[: load.matched], options.get("ratio", 0.05), plan.exact, states)
            traffic.hits.append(hit)
            traffic.anchored += plan.anchor is not None

    engine.worker.observer = loaded
    sent, running, leaves = 0, set[str](), dict[str, int]()
    while sent < REQUESTS or running:
        while sent < REQUESTS and len(running) < AT_ONCE:
            document = documents[int(draw.paretovariate(0.6)) % DOCUMENTS]
            cut = draw.randrange(100, len(document))
            ids = document[:cut] + [draw.randrange(3, 1000) for _ in range(draw.randrange(1, 250))]
            mode = draw.choice(["exact", "exact", "replay", "half", "off"])
            options = {"mode": mode}
            if mode in ("replay", "half"):
                # A state is carried or not by what others have saved meanwhile: alone it would be another one.
                options = {"mode": "replay", "ratio": 0.5 if mode == "half" else 0.05, "start": "zero"}
            name = f"r{sent}"
            prompts[name] = ids, options
            params = SamplingParams(
                max_tokens=draw.choice([1, 5, 40, 400]),
                temperature=0,
                ignore_eos=True,
                extra_args={"kv_transfer_params": {"tailreplay": {**options, "store": draw.random() < 0.9}}},
            )
            core.add_request(name, {"prompt_token_ids": ids}, params)
            running.add(name)
            if draw.random() < 0.15:
                leaves[name] = draw.randrange(1, 12)
            sent += 1
            if sent % 50 == 0:
                traffic.resident.append(resident_bytes())
        for name in [name for name in leaves if name in running]:
            leaves[name] -= 1
            if leaves[name] < 0:
                core.abort_request([name])
                running.discard(name)
                traffic.aborted += 1
        for out in core.step():
            if out.finished:
                running.discard(out.request_id)
                traffic.finished += 1
    engine.worker.observer = None
    return traffic


def as_finished(states: dict[str, list[Any]]) -> Finished:
    return Finished([], 0, {}, states)


def test_every_hit_has_the_states_that_it_has_alone(engine: Engine) -> None:
    traffic = drive(engine, random.Random(0))
    engine.run(OTHER, mode="off", store=False)
    engine.run(OTHER, mode="off", store=False)
    counts, catalog = engine.deciding.counts, engine.deciding.catalog
    assert traffic.finished + traffic.aborted == REQUESTS
    assert traffic.aborted > REQUESTS // 30
    assert counts["preemptions"] > 0
    assert catalog.evictions > 0
    assert catalog.pinned == 0
    assert catalog.bytes_used <= engine.deciding.limit_bytes
    assert len(traffic.hits) > REQUESTS // 4
    exact = [hit for hit in traffic.hits if hit.exact]
    assert len(exact) > REQUESTS // 10
    assert traffic.anchored > REQUESTS // 20
    assert catalog.anchors.evicted > 0
    assert catalog.anchors.used <= catalog.anchors.slots
    # Nothing is left of requests that have ended; the last one to end lands with the next step.
    assert engine.worker.capture.requests <= 1
    assert len(engine.deciding._requests) + len(engine.deciding._landing) <= 2
    # Once all of the store has been touched, what grows is what this test keeps: the states of the hits.
    kept = sum(state.numel() * state.element_size() for hit in traffic.hits for s in hit.states.values() for state in s)
    half = len(traffic.resident) // 2
    assert traffic.resident[-1] - traffic.resident[half] < kept + 0.05 * traffic.resident[half]

    cold: dict[tuple[int, ...], tuple[Finished, float]] = {}
    worst = 0.0
    for hit in exact:
        if tuple(hit.ids) not in cold:
            alone = engine.run(hit.ids, mode="off", store=False)
            other = engine.run(hit.ids, chunk=max(16, len(hit.ids) // 3), mode="off", store=False)
            cold[tuple(hit.ids)] = alone, error(other, alone)
        alone, floor = cold[tuple(hit.ids)]
        wrong = error(as_finished(hit.states), alone)
        assert wrong < max(2 * floor, 0.03), f"a hit of {len(hit.ids)} tokens"
        worst = max(worst, wrong)
    print(f"{len(exact)} exact hits, worst state error {worst:.4f}, preemptions {counts['preemptions']}")


def test_approximate_hits_have_the_states_of_the_same_replay_alone(engine: Engine) -> None:
    traffic = drive(engine, random.Random(1))
    approximate = [hit for hit in traffic.hits if not hit.exact][:60]
    assert len(approximate) > 10
    seen: list[dict[str, list[Any]]] = []
    for hit in approximate:
        engine.run(hit.ids, mode="off")
        engine.run(OTHER, mode="off", store=False)
        engine.worker.observer = lambda load: seen.append(engine.worker.states.read(load.states))
        again = engine.run([*hit.ids, 4], mode="replay", ratio=hit.ratio, start="zero", store=False)
        engine.worker.observer = None
        assert again.report["matched"] == len(hit.ids)
        assert error(as_finished(hit.states), as_finished(seen[-1])) < 0.05
