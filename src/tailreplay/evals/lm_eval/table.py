"""Where a comparison goes: a table for people, JSON for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lm_eval.utils import handle_non_serializable
from rich.table import Table

from tailreplay import __version__
from tailreplay.errors import InvalidRequestError
from tailreplay.evals.lm_eval.report import Outcome, Row, mean_retention, rows_of

_COLUMNS = ("task", "metric", "samples", "method", "score", "of full", "reused", "replayed")


def table_of(model: str, outcomes: list[Outcome]) -> Table:
    """Return a table with a row for each task, metric and method."""
    rows = rows_of(outcomes)
    table = Table(title=f"{model} on lm-evaluation-harness", caption="reused, replayed: shares of the prompts' tokens")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in ("task", "metric", "method") else "right")
    for index, row in enumerate(rows):
        first = index % len(outcomes) == 0
        last = index % len(outcomes) == len(outcomes) - 1
        table.add_row(*_cells(row, first), end_section=last)
    if len({(row.task, row.metric) for row in rows}) > 1:
        for outcome in outcomes:
            name = "mean" if outcome is outcomes[0] else ""
            table.add_row(name, "", "", outcome.method.label, "", _percent(mean_retention(rows, outcome.method)))
    return table


def write_json(path: Path, model: str, outcomes: list[Outcome]) -> None:
    """Write the rows, and the harness' own results of each method."""
    report = {
        "tailreplay": __version__,
        "model": model,
        "rows": [row.to_dict() for row in rows_of(outcomes)],
        "lm_eval": {outcome.method.label: outcome.results for outcome in outcomes},
    }
    path.write_text(json.dumps(report, indent=2, default=_plain, ensure_ascii=False), encoding="utf-8")


def check_writable(path: Path) -> None:
    """Refuse now what could not be written after the run."""
    if path.suffix != ".json":
        raise InvalidRequestError(f"The output must be a .json file, got '{path}'.", "output")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise InvalidRequestError(f"The output cannot be written to '{path}': {error}.", "output") from error


def _cells(row: Row, first: bool) -> list[str]:
    tokens = max(1, row.tally.prompt_tokens)
    return [
        row.task if first else "",
        row.metric if first else "",
        str(row.samples) if first else "",
        row.method.label,
        f"{row.score:.4f}",
        _percent(row.retention),
        _percent(row.tally.reused_share),
        _percent(row.tally.replayed / tokens),
    ]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def _plain(value: Any) -> Any:
    return handle_non_serializable(value)
