"""A small cell of each task on the bundled model against a whole run's scores, and what must hold of any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tailreplay.cli import main
from tailreplay.evals.tasks.registry import TASKS
from tests.evals.stored import LENGTH, METHODS, NUMBERS, STORED, of_summary

SAMPLES = 30


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out: Path = tmp_path_factory.mktemp("scores")
    methods = [method for method in METHODS if method.startswith("replay")]
    arguments = ["--lengths", str(LENGTH), "--samples", str(SAMPLES), "--methods", *methods, "--out", str(out)]
    assert main(["eval", "bundled", *arguments]) == 0
    return json.loads((out / "summary.json").read_text(encoding="utf-8"))


def test_stored_scores_are_of_every_task() -> None:
    assert set(json.loads(STORED.read_text(encoding="utf-8"))) == set(TASKS)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("task", TASKS)
def test_each_cell_is_within_the_intervals_of_the_whole_run(summary: dict[str, Any], task: str, method: str) -> None:
    stored = json.loads(STORED.read_text(encoding="utf-8"))[task][method]
    found = of_summary(summary)[task][method]
    assert set(found) == set(stored) & set(found)
    assert found or task == "prose", "nothing was measured"
    for name in NUMBERS:
        if name not in found:
            continue
        (value, low, high), (_, stored_low, stored_high) = found[name], stored[name]
        assert low <= stored_high, (name, value)
        assert stored_low <= high, (name, value)


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
    gaps = [rows[method]["nll_gap_closed"] for method in ("zero", "replay@0.05", "replay@1")]
    assert gaps == sorted(gaps)
    assert gaps[0] == 0.0


def test_it_is_a_hybrid(summary: dict[str, Any]) -> None:
    assert {verdict["name"]: verdict["passed"] for verdict in summary["verdicts"]} == {
        "kv-wipe": True,
        "zero-states": True,
    }
