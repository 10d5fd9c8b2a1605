"""Tiers below host memory with two ranks: each writes and fetches its share, and a page is there if all shares are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailreplay.page_format import unpack_header
from tailreplay.tiers.disk import DiskTier
from tests.vllm_live.conftest import Engine, error
from tests.vllm_live.test_tiers import BASE, settings_of, settle
from tests.vllm_slow.test_ranks import WAYS


@pytest.mark.parametrize("way", ["tensor", "pipeline"])
def test_a_restarted_engine_of_two_ranks_hits_exactly(
    way: str, slow_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    arguments, _ = WAYS[way]
    settings = settings_of(tmp_path / "cache", hidden_codec="none")
    first = Engine(slow_model, arguments, **settings)
    first.run(BASE, mode="off")
    settle(first)
    prompt = [*BASE[:2000], 4]
    cold = first.run(prompt, mode="off", store=False)
    other = first.run(prompt, chunk=600, mode="off", store=False)
    first.close()
    second = Engine(slow_model, arguments, **settings)
    hit = second.run(prompt, mode="exact", store=False)
    assert 1900 < hit.report["matched"] <= 2000
    assert error(hit, cold) < max(2 * error(other, cold), 0.02)
    settle(second)
    assert second.deciding.catalog.pinned == 0
    # One rank's share of the first page is lost: nothing of it is used.
    second.deciding.catalog.clear()
    second.close()
    tier = DiskTier(tmp_path / "cache")
    key = next(key for key, header, _ in tier.headers() if unpack_header(header).start == 0)
    tier.drop([key])
    tier.close()
    third = Engine(slow_model, arguments, **settings)
    partly = third.run(prompt, mode="exact", store=False)
    assert partly.report["matched"] == 0
    assert error(partly, cold) < max(2 * error(other, cold), 0.02)
    third.close()
