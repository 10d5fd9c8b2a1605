"""The run's file of records: one JSON line a document, appended when it is measured, so that a run can go on.

A record::

    {"task": "count", "length": 1024, "document": 3, "hits": [
        {"matched": 864,            # tokens of the cached prefix
         "turn": null,              # of a conversation, from 0
         "tails": {"replay@0.05": 44},                    # tokens replayed (longest tail), by method
         "state_error": {"replay@0.05": [0.2, 0.05]},     # relative, by linear layer
         "probes": [
             {"evidence": 790,      # first token of the earliest fact that the answer depends on
              "results": {"full": {"score": 1.0, "nll": 0.8, "first_nll": null, "tokens": 5,
                                   "answer": "3"}}}]}]}

``score`` and ``answer`` are null where nothing is generated; ``nll`` is a mean over the reference's `tokens`, in nats.
``answer`` ends with the reference if the model would have written that.

Where a method starts otherwise than in the paper, a hit has ``anchors`` (its token, by method), ``head_norm`` and
``head_error`` (squared size of each head's true state, and squared error by method), and results of plain text have
``kl`` and ``first_kl`` (divergence from full prefill's prediction, nats a token).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tailreplay.errors import InvalidRequestError

Record = dict[str, Any]


class RunFolder:
    """Where a run keeps its settings and records.

    Parameters
    ----------
    path : Path
        Made if need be.
    settings : dict
        What the numbers depend on. A folder of other settings is refused: its records would be mixed with ours.

    Raises
    ------
    InvalidRequestError
        If the folder holds another run, or cannot be written.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self._file = path / "records.jsonl"
        known = path / "settings.json"
        try:
            path.mkdir(parents=True, exist_ok=True)
            if known.exists():
                _check_same(path, json.loads(known.read_text(encoding="utf-8")), settings)
            else:
                fresh = known.with_suffix(".new")
                fresh.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
                fresh.replace(known)
            self._file.touch()
        except (OSError, ValueError) as error:
            raise InvalidRequestError(f"The folder '{path}' cannot be used for this run: {error}.", "out") from error

    def records(self) -> list[Record]:
        """Return what has been measured; a line that a crash cut off is left out, and will be measured again."""
        found: dict[tuple[str, int, int], Record] = {}
        for line in self._file.read_bytes().splitlines():
            try:
                record = json.loads(line)
                found[record["task"], record["length"], record["document"]] = record
            except (ValueError, TypeError, KeyError):
                continue
        return list(found.values())

    def append(self, record: Record) -> None:
        """Add a document's record."""
        try:
            # Unbuffered: one write a record, so that two runs may share a folder.
            with self._file.open("a+b", buffering=0) as file:
                broken = b"\n" if file.tell() and not _ends_line(file) else b""
                line = broken + json.dumps(record).encode() + b"\n"
                if file.write(line) != len(line):
                    raise OSError("the disk is full")
        except OSError as error:
            raise InvalidRequestError(f"The records in '{self.path}' cannot be written: {error}.", "out") from error


def _ends_line(file: Any) -> bool:
    file.seek(-1, 2)
    return bool(file.read(1) == b"\n")


def _check_same(path: Path, known: Any, settings: dict[str, Any]) -> None:
    if not isinstance(known, dict):
        raise ValueError("its settings are damaged")
    different = [name for name in {*known, *settings} if known.get(name) != settings.get(name)]
    if different:
        raise InvalidRequestError(
            f"The folder '{path}' holds a run with another {', '.join(sorted(different))}: give --out another folder.",
            "out",
        )
