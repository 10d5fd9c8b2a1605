"""Every tier against the contract."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

from tests.tiers.contract import TierMachine
from tests.tiers.harness import Harness
from tests.tiers.harnesses import DiskHarness, MemoryHarness

EXAMPLES = int(os.environ.get("TAILREPLAY_EXAMPLES", "60"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", [MemoryHarness, DiskHarness])
def test_a_tier_keeps_its_contract(kind: type[Harness]) -> None:
    class Machine(TierMachine):
        def __init__(self) -> None:
            self.harness = kind()
            super().__init__()

    machine = Machine.TestCase
    machine.settings = settings(
        max_examples=EXAMPLES, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
    machine().runTest()
