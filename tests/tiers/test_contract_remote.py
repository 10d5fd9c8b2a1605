"""The tiers on servers against the contract of all tiers."""

from __future__ import annotations

import os

import pytest

from tests.tiers.conftest import require
from tests.tiers.contract import Harness, TierMachine
from tests.tiers.quick import quick
from tests.tiers.remote_harnesses import GuardedHarness, MooncakeHarness, RedisHarness

EXAMPLES = int(os.environ.get("TAILREPLAY_EXAMPLES", "8"))


@pytest.mark.parametrize("kind", [RedisHarness, GuardedHarness, MooncakeHarness])
def test_a_tier_keeps_its_contract(kind: type[Harness]) -> None:
    require("mooncake" if kind is MooncakeHarness else "redis")

    class Machine(TierMachine):
        def __init__(self) -> None:
            self.harness = kind()
            super().__init__()

    machine = Machine.TestCase
    machine.settings = quick(EXAMPLES)
    machine().runTest()
