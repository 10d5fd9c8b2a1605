"""Reports of several prompts, added up."""

from __future__ import annotations

import pytest

from tailreplay.engines.transformers.results import GenerationResult, ReuseReport
from tailreplay.provenance import Provenance
from tailreplay.server.responses import reuse_report


def result(provenance: Provenance) -> GenerationResult:
    report = ReuseReport(
        prompt_tokens=100,
        matched=99,
        replayed=64,
        mode="replay",
        ratio=0.05,
        exact=provenance.is_exact,
        provenance=str(provenance),
        depth=provenance.depth,
        miss_reason="",
        stop="end",
    )
    return GenerationResult("a", [1], "length", report)


@pytest.mark.parametrize(
    ("provenances", "worst"),
    [
        ([Provenance(2), Provenance(10), Provenance(9)], "approximate (depth 10)"),
        ([Provenance(), Provenance(1)], "approximate (depth 1)"),
        ([Provenance(1), Provenance(0, lossy=True)], "approximate (depth 1)"),
        ([Provenance(), Provenance(0, lossy=True), Provenance()], "quantised"),
        ([Provenance(), Provenance()], "exact"),
    ],
)
def test_worst_provenance_is_told(provenances: list[Provenance], worst: str) -> None:
    report = reuse_report([result(provenance) for provenance in provenances], 0.0)
    assert report["provenance"] == worst
    assert report["exact"] == (worst == "exact")
    assert [part["provenance"] for part in report["prompts"]] == [str(provenance) for provenance in provenances]
    assert (report["matched"], report["replayed"]) == (99 * len(provenances), 64 * len(provenances))
