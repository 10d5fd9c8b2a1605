"""The report as plain JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tailreplay.evals.summary import Summary


def to_json(summary: Summary, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the run and all its numbers, ready for `json.dumps(..., allow_nan=False)`.

    Parameters
    ----------
    summary : Summary
    settings : mapping
        Whatever describes the run; values that JSON does not have are written as text.
    """
    return {"settings": _plain(settings), **summary.to_dict()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)
