"""Every family, every tier, every codec and policy: a hit that comes up from below is the hit from host memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tailreplay import HybridLM, PrefixCache, Storage
from tailreplay.modes import parse_reuse
from tailreplay.tiers.base import Tier
from tailreplay.tiers.disk import DiskTier
from tests.engine.test_families import IDS, TOLERANCE, hit, prefill, state_errors
from tests.engine.tiny_models import CONFIGS, tiny_model
from tests.tiers.memory_tier import MemoryTier

M = 208  # sixteen tokens into the last page: by so many it is found from below
# Relative error of a state that may come of 8 bits a channel.
ROUGH = {"none": TOLERANCE, "int8": 0.05, "fp8_e4m3": 0.15}


@pytest.fixture(params=["memory", "disk"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    made: Tier = MemoryTier(1 << 26) if request.param == "memory" else DiskTier(tmp_path / "cache", 64 << 20)
    yield made
    made.close()


def model_over(name: str, tier: Tier, **storage: Any) -> HybridLM:
    return HybridLM(tiny_model(name), cache=PrefixCache("64MiB", storage=Storage([tier], deadline=10.0, **storage)))


@pytest.mark.parametrize("policy", ["lru", "flops"])
@pytest.mark.parametrize("codec", ROUGH)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_hit_from_below_is_a_hit_from_host_memory(name: str, codec: str, policy: str, tier: Tier) -> None:
    first = model_over(name, tier, hidden_codec=codec, policy=policy, hidden_share=0.5)
    prefill(first, IDS)
    assert first.cache.flush()
    second = model_over(name, tier, policy=policy)
    topology = second.backbone.topology
    replay = parse_reuse("replay", 0.3)
    above, below = hit(first, IDS[: M + 1], replay, M), hit(second, IDS[: M + 1], replay, M)
    assert max(state_errors(second, below, above)) < ROUGH[codec]
    lossy = codec != "none" and bool(topology.stored_groups)
    assert below.provenance.lossy == lossy
    plan = second.cache.lookup(IDS[: M + 1], second.namespace(), parse_reuse("exact"), topology)
    assert plan.matched == (0 if lossy else M)
    assert plan.exact
    second.cache.release(plan)
    assert first.cache.stats().pinned == second.cache.stats().pinned == 0


def test_other_weights_dtypes_and_layouts_find_nothing(tier: Tier) -> None:
    name = next(iter(CONFIGS))
    first = model_over(name, tier)
    prefill(first, IDS)
    assert first.cache.flush()
    same = model_over(name, tier)
    hit(same, IDS, parse_reuse("replay"), len(IDS) - 1)
    others = [HybridLM(model, cache=PrefixCache("64MiB", storage=Storage([tier]))) for model in (
        tiny_model(name, seed=1), copy.deepcopy(tiny_model(name)).bfloat16(), tiny_model(list(CONFIGS)[-1])
    )]  # fmt: skip
    others.append(HybridLM(tiny_model(name), cache=PrefixCache("64MiB", page_size=32, storage=Storage([tier]))))
    for index, other in enumerate(others):
        plan = other.cache.lookup(IDS, other.namespace(), parse_reuse("replay"), other.backbone.topology)
        assert plan.miss_reason == "unseen_prefix", index
