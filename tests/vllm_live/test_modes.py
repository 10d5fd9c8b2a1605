"""Other ways of running the engine: synchronous loads, compiled, and beside vLLM's own prefix cache."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_live.conftest import Engine, error

DRAW = random.Random(3)
BASE = [DRAW.randrange(3, 1000) for _ in range(2900)]
OTHER = [5, 6, 7]
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sync": ({}, {"async_loads": False}),
    "compiled": ({"enforce_eager": False}, {}),
}


def after(m: int) -> list[int]:
    """A prompt that shares exactly m tokens with `BASE`."""
    return [*BASE[:m], 3 + (BASE[m] - 2) % 997]


@pytest.fixture(scope="module", params=WAYS)
def stored(request: pytest.FixtureRequest, slow_model: Path) -> Iterator[Engine]:
    """An engine with `BASE` in its cache."""
    arguments, settings = WAYS[request.param]
    running = Engine(slow_model, arguments, host_bytes="64MiB", min_match=1, **settings)
    running.run(BASE, mode="off")
    running.run(OTHER, mode="off", store=False)  # a step in which the last page lands
    yield running
    running.close()


@pytest.mark.parametrize("name", ["33", "B-1", "B", "B+1", "777", "2817"])
def test_an_exact_hit_has_the_states_of_a_cold_run(stored: Engine, name: str) -> None:
    m = {"B-1": stored.block - 1, "B": stored.block, "B+1": stored.block + 1}.get(name) or int(name)
    prompt = after(m)
    cold = stored.run(prompt, mode="off", store=False)
    other = stored.run(prompt, chunk=max(16, m // 3), mode="off", store=False)
    hit = stored.run(prompt, mode="exact", store=False)
    assert hit.cached == hit.report["matched"] == m
    assert hit.report["replayed"] == m - (hit.report["anchor"] or 0)
    assert error(hit, cold) < max(2 * error(other, cold), 0.02)
    assert stored.deciding.catalog.pinned == 0
