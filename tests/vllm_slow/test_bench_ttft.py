"""`tailreplay bench ttft` on both engines, a process each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tailreplay.bench.ttft_plan import Target, TtftPlan
from tailreplay.bench.ttft_rows import PHASES
from tailreplay.bench.ttft_run import Record, measure
from tailreplay.cli import main


def test_both_engines_report_the_same_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, saved = tmp_path / "report.html", tmp_path / "rows.jsonl"
    arguments = ["--shape", "bundled", "--engine", "transformers", "vllm", "--lengths", "300", "1K", "--repeats", "2"]
    arguments += ["--ratios", "5%", "50%", "--ablations", "none", "both", "--json", "--html", str(page)]
    assert main(["bench", "ttft", *arguments, "--save", str(saved)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [run["engine"] for run in report["runs"]] == ["transformers", "vllm"]
    assert report["runs"][1]["flags"]["enforce_eager"]
    assert len(report["rows"]) == 16
    ours, theirs = report["rows"][:8], report["rows"][8:]
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for name in ("length", "ratio", "ablation", "matched", "replayed", "full_flops", "hit_flops", "loaded_bytes"):
            assert one[name] == other[name]
        for row in (one, other):
            assert sum(row[f"{phase}_ms"] for phase in PHASES) < 2 * row["hit_ms"]
            assert min(row[f"{phase}_ms"] for phase in PHASES if phase != "fetch") > 0
    assert len(saved.read_text().splitlines()) == 16
    assert page.read_text().count('id="row-') == 16


def test_one_that_fails_leaves_the_others() -> None:
    targets = (Target("/no/such/model", False, "transformers"), Target("tiny", True, "transformers"))
    plan = TtftPlan(targets, (128,), (0.5,), ("both",), dtype="float32", repeats=1, cold_repeats=1, warmup=0)
    kept: list[Record] = []
    (wrong,) = measure(plan, kept.append)
    assert "no model folder '/no/such/model'" in wrong
    assert [(record["row"]["model"], record["row"]["matched"]) for record in kept] == [
        ("tiny shape, random weights", 128)
    ]
