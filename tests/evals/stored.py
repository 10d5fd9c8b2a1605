"""Makes `scores.json`: what the bundled model scored in a longer run.

tailreplay eval --lengths 1024 --out out/eval/bundled
python -m tests.evals.stored out/eval/bundled
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tailreplay.evals.plan import EvalPlan
from tailreplay.evals.report import to_json
from tailreplay.evals.summary import summarise
from tailreplay.evals.tasks.registry import TASKS

STORED = Path(__file__).with_name("scores.json")
LENGTH, SAMPLES = 1024, 30
METHODS = ("full", "zero", "replay@0.05", "replay@1")
LOSSES = ("nll_over_full", "first_nll_over_full")
"""Of the task that has no score."""


def plan() -> EvalPlan:
    """The run that the test makes."""
    replays = tuple(method for method in METHODS if method.startswith("replay"))
    return EvalPlan("bundled", tuple(TASKS), replays, (LENGTH,), samples=SAMPLES)


def of_summary(summary: dict[str, Any]) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Return value, low and high of each number by task and method."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for cell in summary["cells"]:
        if cell["method"] not in METHODS:
            continue
        numbers = {
            name: [round(cell[name + end], 4) for end in ("", "_low", "_high")]
            for name in (LOSSES if cell["score"] is None else ("score",))
            if cell[f"{name}_low"] is not None
        }
        found.setdefault(cell["task"], {})[cell["method"]] = numbers
    return found


if __name__ == "__main__":
    lines = (Path(sys.argv[1]) / "records.jsonl").read_text(encoding="utf-8").splitlines()
    chosen = [record for record in map(json.loads, lines) if record["length"] == LENGTH]
    whole = to_json(summarise(chosen, {name: task.info for name, task in TASKS.items()}), {})
    STORED.write_text(json.dumps(of_summary(whole), indent=1) + "\n", encoding="utf-8")
