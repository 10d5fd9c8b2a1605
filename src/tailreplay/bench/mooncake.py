"""Traces in the format that Mooncake publishes its own in: JSON lines with a hash id for every 512 tokens of the prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tailreplay.bench.traces import Request, Tokens, Trace
from tailreplay.errors import InvalidRequestError

BLOCK = 512
LONGEST = 1 << 24  # tokens; more is a mistake, and would fill the memory
FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


def file_trace(path: str | Path) -> Trace:
    """Return the trace in the file at `path`, which is read again each time the trace is.

    Equal hash ids become equal tokens. Answers become tokens of their own: the format does not say which blocks of later
    prompts hold them.

    Raises
    ------
    InvalidRequestError
        While it is read: if the file cannot be, is empty, or holds a line that is not in the format. The message is one
        sentence with the line's number.
    """
    return Trace(Path(path).name, lambda: _read(Path(path)))


def block_tokens(block: int, count: int = BLOCK) -> Tokens:
    """Return the first `count` tokens that stand for a hash id: always the same, and others for every other id."""
    return _mixed(np.arange(count, dtype=np.uint64) + np.uint64(block * BLOCK % (1 << 64)))


def _read(path: Path) -> Iterator[Request]:
    number = 0
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                yield _request(_record(line, f"Line {number} of '{path}'"), number)
    except OSError as error:
        raise InvalidRequestError(f"The trace '{path}' cannot be read: {error.strerror}.") from None
    if not number:
        raise InvalidRequestError(f"The trace '{path}' is empty: line 1 should be a JSON object.")


def _record(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise InvalidRequestError(f"{where} is not JSON.") from None
    if not isinstance(record, dict):
        raise InvalidRequestError(f"{where} should be a JSON object with {', '.join(FIELDS)}.")
    for name in FIELDS:
        if name not in record:
            raise InvalidRequestError(f"{where} has no '{name}'.")
    _check(record, where)
    return record


def _check(record: dict[str, Any], where: str) -> None:
    for name, least in (("input_length", 1), ("output_length", 0)):
        if not _is_whole(record[name]) or not least <= record[name] <= LONGEST:
            raise InvalidRequestError(
                f"{where}: '{name}' must be a whole number from {least} to {LONGEST:,}, got {_shown(record[name])}."
            )
    at = record["timestamp"]
    # NaN is in no range.
    if isinstance(at, bool) or not isinstance(at, (int, float)) or not 0 <= at < 1e18:
        raise InvalidRequestError(f"{where}: 'timestamp' must be a number of milliseconds, got {_shown(at)}.")
    blocks = record["hash_ids"]
    if not isinstance(blocks, list) or not all(map(_is_whole, blocks)):
        raise InvalidRequestError(f"{where}: 'hash_ids' must be a list of whole numbers, got {_shown(blocks)}.")
    wanted = -(-record["input_length"] // BLOCK)
    if len(blocks) != wanted:
        raise InvalidRequestError(
            f"{where}: {record['input_length']} tokens are {wanted} blocks of {BLOCK}, "
            f"but there are {len(blocks)} hash_ids."
        )


def _request(record: dict[str, Any], number: int) -> Request:
    prompt = np.concatenate([block_tokens(block) for block in record["hash_ids"]])[: record["input_length"]]
    # Another range than that of any sensible hash id.
    output = block_tokens((1 << 54) + number * (LONGEST // BLOCK), record["output_length"])
    return Request(record["timestamp"] / 1000, prompt, output)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _mixed(numbers: np.ndarray) -> Tokens:
    """Return 32 bits for each number that look random: its product with an odd constant, its halves folded twice."""
    for _ in range(2):
        numbers = (numbers ^ (numbers >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return (numbers >> np.uint64(32)).astype(np.uint32)
