"""Every tier against the contract."""

from __future__ import annotations

import os

import pytest

from tests.tiers.harness import Harness
from tests.tiers.harnesses import DiskHarness, MemoryHarness
from tests.tiers.quick import keeps_contract

EXAMPLES = int(os.environ.get("TAILREPLAY_EXAMPLES", "60"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", [MemoryHarness, DiskHarness])
def test_a_tier_keeps_its_contract(kind: type[Harness]) -> None:
    keeps_contract(kind, EXAMPLES)
