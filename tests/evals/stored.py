"""Makes `scores.json`: what the bundled model scored in a whole run.

tailreplay eval --lengths 1024 --out out/eval/bundled
python -m tests.evals.stored out/eval/bundled/summary.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

STORED = Path(__file__).with_name("scores.json")
LENGTH = 1024
METHODS = ("full", "zero", "replay@0.05", "replay@1")
NUMBERS = ("score", "nll_over_full", "first_nll_over_full")


def of_summary(summary: dict[str, Any]) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Return value, low and high of each number by task and method."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for cell in summary["cells"]:
        if cell["length"] != LENGTH or cell["method"] not in METHODS:
            continue
        numbers = {
            name: [round(cell[name + end], 4) for end in ("", "_low", "_high")]
            for name in NUMBERS
            if cell[f"{name}_low"] is not None
        }
        found.setdefault(cell["task"], {})[cell["method"]] = numbers
    return found


if __name__ == "__main__":
    whole = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    STORED.write_text(json.dumps(of_summary(whole), indent=1) + "\n", encoding="utf-8")
