"""Settings of state machines over media."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

from tests.tiers.contract import TierMachine
from tests.tiers.harness import Harness


def quick(examples: int) -> settings:
    """Return settings for `examples` runs of 30 steps.

    A failure is shown as it was found: making it shorter takes minutes where each step waits for a medium. Set
    TAILREPLAY_SHRINK=1 for that.
    """
    phases = [Phase.explicit, Phase.reuse, Phase.generate]
    if os.environ.get("TAILREPLAY_SHRINK"):
        phases.append(Phase.shrink)
    return settings(
        max_examples=examples,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=phases,
    )


def keeps_contract(kind: type[Harness], examples: int) -> None:
    """Run the contract's machine on a tier."""

    class Machine(TierMachine):
        def __init__(self) -> None:
            self.harness = kind()
            super().__init__()

    machine = Machine.TestCase
    machine.settings = quick(examples)
    machine().runTest()
