"""Names of approximate requests, on their way to whoever has them computed again."""

from __future__ import annotations

from tailreplay.engines.vllm.reports import Tally
from tailreplay.engines.vllm.stats import TailReplayStats
from tailreplay.plan import ReplayPlan
from tailreplay.provenance import EXACT, Provenance, Start


def test_the_metrics_carry_the_names() -> None:
    tally = Tally()
    plan = ReplayPlan(9, 5, (1,), (), "replay", 0.05, False, Provenance(1, start=Start.ZERO), "", "end")
    tally.add(plan, "one")
    tally.add(plan, "")
    tally.add(ReplayPlan(9, 5, (1,), (), "replay", 0.05, True, EXACT, "", "end"), "two")
    assert tally._approximate == ["one"]
    first = TailReplayStats({"counts": {"hit:approximate": 1}, "sizes": {}, "approximate": ["one"]})
    both = first.aggregate(TailReplayStats({"counts": {}, "sizes": {}, "approximate": ["three"]}))
    assert both.data["approximate"] == ["one", "three"]
