"""Rows in a file, a line each, so that a run that is cut off loses nothing."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tailreplay.ablation import ABLATIONS
from tailreplay.bench.ttft_rows import PHASES
from tailreplay.errors import InvalidRequestError

_IDENTITY = ("model", "engine", "dtype", "length", "query", "ratio", "ablation")
_MERGED = ("model", "engine", "dtype", "device", "machine", "threads", "date", "query", "repeats")
_TEXTS = {"run": ("model", "engine", "dtype", "device"), "row": ("model", "engine", "dtype")}
_NUMBERS = (
    *("length", "query", "ratio", "replayed", "full_ms", "full_mean_ms", "full_p95_ms", "hit_ms", "hit_mean_ms"),
    *("hit_p95_ms", "speedup", "limit", "vs_limit", "copy_limit_ms", "loaded_mib", *(f"{name}_ms" for name in PHASES)),
)
_ABOVE_ZERO = ("length", "query", "ratio", "full_ms", "hit_ms", "speedup", "limit")


def load(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Read records.

    Of rows that were measured twice the later stays; a line that no report can be made of, like one that was cut off, is
    left out, and said.

    Raises
    ------
    InvalidRequestError
        If a file cannot be read, or there are no rows.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f"'{path}' cannot be read: {error}.") from error
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                _check(record)
                identity = tuple(record["row"][name] for name in _IDENTITY)
            except (ValueError, KeyError, TypeError):
                print(f"{path}: line {number} is not a saved row and is left out.", file=sys.stderr)
                continue
            found.pop(identity, None)  # the later one takes the place at the end
            found[identity] = record
    if not found:
        raise InvalidRequestError("There are no saved rows in " + ", ".join(f"'{path}'" for path in paths) + ".")
    return list(found.values())


def _check(record: Any) -> None:
    """Raise `ValueError`, `KeyError` or `TypeError` for a record that reports cannot be made of."""
    run, row = record["run"], record["row"]
    wrong = [name for part in _TEXTS for name in _TEXTS[part] if not isinstance(record[part][name], str)]
    wrong += [name for name in _NUMBERS if not _is_number(row[name])]
    wrong += [name for name in ("length", "query", "replayed") if not isinstance(row[name], int)]
    wrong += [name for name in _MERGED if name in run and not (isinstance(run[name], str) or _is_number(run[name]))]
    wrong += [] if isinstance(run["flags"], dict) and isinstance(run.get("versions", {}), dict) else ["flags"]
    wrong += [] if _is_number(run["copy_gb_s"]) else ["copy_gb_s"]
    if wrong or row["ablation"] not in ABLATIONS or any(row[name] <= 0 for name in _ABOVE_ZERO):
        raise ValueError


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def report_of(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the whole report as plain data: what the runs have in common on top, then ``runs`` and ``rows``."""
    runs = [
        run for place, run in enumerate(r["run"] for r in records) if run not in [r["run"] for r in records[:place]]
    ]
    top: dict[str, Any] = {}
    for name in _MERGED:
        values = list(dict.fromkeys(run[name] for run in runs if name in run))
        # Names of models have commas.
        top[name] = values[0] if len(values) == 1 else ("; " if name == "model" else ", ").join(map(str, values))
    for run in runs:
        top.setdefault("versions", {}).update(run.get("versions", {}))
    return {**top, "runs": runs, "rows": [record["row"] for record in records]}
