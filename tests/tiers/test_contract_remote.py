"""The tiers on servers against the contract of all tiers."""

from __future__ import annotations

import os

import pytest

from tests.tiers.conftest import require
from tests.tiers.harness import Harness
from tests.tiers.quick import keeps_contract
from tests.tiers.remote_harnesses import GuardedHarness, MooncakeHarness, RedisHarness

EXAMPLES = int(os.environ.get("TAILREPLAY_EXAMPLES", "8"))


@pytest.mark.parametrize("kind", [RedisHarness, GuardedHarness, MooncakeHarness])
def test_a_tier_keeps_its_contract(kind: type[Harness]) -> None:
    require("mooncake" if kind is MooncakeHarness else "redis")
    keeps_contract(kind, EXAMPLES)
