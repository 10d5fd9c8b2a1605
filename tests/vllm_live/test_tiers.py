"""Tiers below host memory, inside vLLM engines: what one engine writes, the next one finds."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_live.conftest import Engine, error

RANDOM = random.Random(7)
BASE = [RANDOM.randrange(3, 1000) for _ in range(2900)]
SECONDS = 60.0


def settings_of(folder: Path, **more: Any) -> dict[str, Any]:
    return {"host_bytes": "64MiB", "min_match": 1, "tiers": [f"disk:{folder}?limit=256MiB"], **more}


def settle(engine: Engine) -> None:
    """Run steps until every page that was stored has been written."""
    until = time.monotonic() + SECONDS
    while True:
        engine.run([5, 6, 7], mode="off", store=False)
        lower = engine.deciding._lower
        if not lower._spilling and not lower._waiting and not lower._fetching:
            return
        assert time.monotonic() < until, engine.deciding.counts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiers") / "cache"


@pytest.fixture(scope="module")
def restarted(slow_model: Path, folder: Path) -> Iterator[Engine]:
    """A second engine after one that has stored `BASE`, both lossless, on the same folder."""
    first = Engine(slow_model, **settings_of(folder, hidden_codec="none"))
    first.run(BASE, mode="off")
    settle(first)
    assert first.deciding.counts["written_pages"] > 0
    first.close()
    second = Engine(slow_model, **settings_of(folder, hidden_codec="none"))
    yield second
    second.close()


def test_a_restarted_engine_hits_at_any_token_and_exactly(restarted: Engine) -> None:
    for m in (777, 2817, len(BASE) - 1):
        prompt = [*BASE[:m], 3 + (BASE[m] - 2) % 997]
        cold = restarted.run(prompt, mode="off", store=False)
        other = restarted.run(prompt, chunk=max(16, m // 3), mode="off", store=False)
        restarted.deciding.catalog.clear()
        hit = restarted.run(prompt, mode="exact", store=False)
        lost = m % restarted.geometry.page_size % max(16, restarted.geometry.page_size // 16)
        assert m - lost <= hit.report["matched"] <= m
        assert hit.report["exact"]
        assert error(hit, cold) < max(2 * error(other, cold), 0.02)
        settle(restarted)
        assert restarted.deciding.catalog.pinned == 0


def test_a_replayed_hit_from_disk_is_the_replayed_hit_from_memory(restarted: Engine) -> None:
    prompt = [*BASE[:2000], 4]
    restarted.deciding.catalog.clear()
    below = restarted.run(prompt, mode="replay", ratio=0.05, store=False)
    settle(restarted)
    above = restarted.run(prompt, mode="replay", ratio=0.05, store=False)
    assert below.report == above.report
    assert below.report["replayed"] == round(0.05 * below.report["matched"])
    assert error(below, above) == 0.0
    assert restarted.deciding.counts["fetched_pages"] > 0


def test_another_salt_finds_nothing(restarted: Engine) -> None:
    from vllm import SamplingParams

    restarted.deciding.catalog.clear()
    params = SamplingParams(max_tokens=1, temperature=0)
    (out,) = restarted.llm.generate([{"prompt_token_ids": BASE, "cache_salt": "other"}], params, use_tqdm=False)
    assert out.kv_transfer_params["tailreplay"]["miss_reason"] == "unseen_prefix"


def test_after_a_change_of_weights_nothing_stored_is_found(restarted: Engine) -> None:
    restarted.deciding.catalog.clear()
    assert restarted.run(BASE, mode="replay", store=False).report["matched"] > 0
    restarted.deciding.reset()
    assert restarted.run(BASE, mode="replay", store=False).report["miss_reason"] == "unseen_prefix"
