"""Rows in a file, a line each, so that a run that is cut off loses nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tailreplay.errors import InvalidRequestError

_IDENTITY = ("model", "engine", "dtype", "length", "query", "ratio", "ablation")
_MERGED = ("model", "engine", "dtype", "device", "machine", "threads", "date", "query", "repeats")


def load(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Read records. Of rows that were measured twice the later stays; a line that was cut off is left out, and said.

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
                identity = tuple(record["row"][name] for name in _IDENTITY)
                record["run"]["model"]
            except (ValueError, KeyError, TypeError):
                print(f"{path}: line {number} is not a saved row and is left out.", file=sys.stderr)
                continue
            found.pop(identity, None)  # the later one takes the place at the end
            found[identity] = record
    if not found:
        raise InvalidRequestError("There are no saved rows in " + ", ".join(f"'{path}'" for path in paths) + ".")
    return list(found.values())


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
