"""Two ranks, one core each: tensor parallel, and pipeline parallel."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_live.conftest import Engine, error

DRAW = random.Random(5)
BASE = [DRAW.randrange(3, 1000) for _ in range(2900)]
OTHER = [5, 6, 7]
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tensor": ({"tensor_parallel_size": 2}, {}),
    "tensor, sync": ({"tensor_parallel_size": 2}, {"async_loads": False}),
    "tensor, own prefix caching": ({"tensor_parallel_size": 2, "enable_prefix_caching": True}, {}),
    # vLLM's CPU workers set up what pipeline stages hand over only where they warm up a compiled model.
    "pipeline": ({"pipeline_parallel_size": 2, "enforce_eager": False}, {}),
}


@pytest.fixture(scope="module", params=WAYS)
def ranks(request: pytest.FixtureRequest, slow_model: Path) -> Iterator[Engine]:
    """An engine of two ranks with `BASE` in its cache."""
    arguments, settings = WAYS[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        running = Engine(slow_model, arguments, host_bytes="64MiB", min_match=1, **settings)
        running.run(BASE, mode="off")
        running.run(OTHER, mode="off", store=False)
        yield running
        running.close()


def after(m: int) -> list[int]:
    return [*BASE[:m], 3 + (BASE[m] - 2) % 997]


@pytest.mark.parametrize("name", ["33", "B-1", "B", "B+1", "777", "2817"])
def test_an_exact_hit_has_the_states_of_a_cold_run(ranks: Engine, name: str) -> None:
    m = {"B-1": ranks.block - 1, "B": ranks.block, "B+1": ranks.block + 1}.get(name) or int(name)
    prompt = after(m)
    runs = []
    for options in ({"mode": "off"}, {"mode": "off", "chunk": max(16, m // 3)}, {"mode": "exact"}):
        if ranks.geometry.aligned_states:
            ranks.llm.reset_prefix_cache()
        runs.append(ranks.run(prompt, store=False, **options))
    cold, other, hit = runs
    assert {state.split(":")[0] for state in hit.states} == {"0", "1"}
    assert hit.report["matched"] == m
    assert hit.report["replayed"] == m - (hit.report["anchor"] or 0)
    assert error(hit, cold) < max(2 * error(other, cold), 0.02)
    assert ranks.deciding.catalog.pinned == 0


def test_each_rank_stores_its_share(ranks: Engine) -> None:
    geometry = ranks.geometry
    assert geometry.hidden_width * geometry.tensor_ranks == geometry.d_model
    assert len(geometry.stages) * geometry.tensor_ranks == 2
    linear = [layer for stage in geometry.stages for group in stage.groups for layer in group.stateful]
    assert linear == [0, 1, 3, 4, 6, 7, 9, 10]  # of the bundled model, whatever rank has them


def test_a_page_damaged_on_one_rank_is_computed_again_on_both(ranks: Engine) -> None:
    if not ranks.scheduler.connector._settings.async_loads:
        return  # a synchronous load that fails ends the engine, as documented
    if ranks.geometry.aligned_states:
        ranks.llm.reset_prefix_cache()
    prompt = after(900)
    cold = ranks.run(prompt, mode="off", store=False)
    ranks.llm.collective_rpc(_damage, args=(1,))
    if ranks.geometry.aligned_states:
        ranks.llm.reset_prefix_cache()
    hit = ranks.run(prompt, mode="exact")
    assert hit.report["miss_reason"] == "load_failed"
    assert error(hit, cold) < 0.02
    ranks.run(OTHER, mode="off", store=False)
    if ranks.geometry.aligned_states:
        ranks.llm.reset_prefix_cache()
    again = ranks.run([*prompt, 9], mode="exact", store=False)
    assert again.report["matched"] == len(prompt), "stored anew"
    assert error(again, ranks.run([*prompt, 9], mode="off", store=False)) < 0.05


def _damage(worker: Any, rank: int) -> None:
    """Runs in a worker's process: flip the bytes of every page of one rank."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    if worker.rank == rank:
        arena = get_kv_transfer_group()._worker.store.arena
        arena._block.bitwise_not_()


def test_every_rank_makes_its_part_of_the_mean_state(ranks: Engine) -> None:
    m = 700
    prompt = [*after(m), 9, 9]
    found = {}
    for _ in range(2):
        ranks.run(BASE[::-1][:600], calibrate=True)
    assert ranks.deciding._lookup.has_mean
    for name, options in {
        "cold": {"mode": "off"},
        "mean": {"ratio": 0.1},
        "zero": {"start": "zero", "ratio": 0.1},
    }.items():
        if ranks.geometry.aligned_states:
            ranks.llm.reset_prefix_cache()
        found[name] = ranks.run(prompt, store=False, **options)
    assert found["mean"].report["start"] in ("mean", "mixed")
    assert error(found["mean"], found["cold"]) < error(found["zero"], found["cold"])
    assert ranks.deciding.catalog.pinned == 0
