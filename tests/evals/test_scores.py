"""A small cell of each task on the bundled model against a whole run's scores, and what must hold of any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tailreplay.cli import main
from tailreplay.evals.tasks.registry import TASKS
from tests.evals.stored import LENGTH, METHODS, SAMPLES, STORED, of_summary, plan

SLACK = 0.05


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out: Path = tmp_path_factory.mktemp("scores")
    numbers = ["--lengths", str(LENGTH), "--samples", str(SAMPLES)]
    assert main(["eval", "bundled", *numbers, "--methods", *plan().methods, "--out", str(out)]) == 0
    return json.loads((out / "summary.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("task", TASKS)
def test_each_cell_is_within_its_stored_interval(summary: dict[str, Any], task: str, method: str) -> None:
    stored = json.loads(STORED.read_text(encoding="utf-8"))[task][method]
    found = of_summary(summary)[task][method]
    assert found
    assert set(found) == set(stored)
    for name, (value, low, high) in found.items():
        # Other versions of Python have other help topics, so the documents differ. Three that agree give an interval
        # without width, hence the slack.
        assert low <= stored[name][2] + SLACK, (name, value)
        assert stored[name][1] - SLACK <= high, (name, value)


def test_replaying_everything_is_full_prefill(summary: dict[str, Any]) -> None:
    cells = {(cell["task"], cell["method"]): cell for cell in summary["cells"]}
    for task in TASKS:
        full, exact = cells[task, "full"], cells[task, "replay@1"]
        if full["score"] is not None:
            assert exact["score"] == pytest.approx(full["score"], abs=0.04), task
        if full["nll"] is not None:
            assert abs(exact["nll_over_full"]) < 0.01, task


def test_quality_rises_with_what_is_replayed(summary: dict[str, Any]) -> None:
    rows = {row["method"]: row for row in summary["summary"]}
    assert rows["zero"]["score_high"] < rows["full"]["score_low"]
    assert rows["zero"]["score"] < rows["replay@0.05"]["score"] <= rows["replay@1"]["score"] + 0.01
    assert rows["zero"]["nll_gap_closed"] == 0.0
    assert rows["replay@0.05"]["nll_gap_closed"] > 0.7
    assert rows["replay@1"]["nll_gap_closed"] == pytest.approx(1, abs=0.1)


def test_it_is_a_hybrid(summary: dict[str, Any]) -> None:
    assert {verdict["name"]: verdict["passed"] for verdict in summary["verdicts"]} == {
        "kv-wipe": True,
        "zero-states": True,
    }
