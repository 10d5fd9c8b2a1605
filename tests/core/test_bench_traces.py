"""Traces: made ones, and files in Mooncake's format."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tailreplay.bench.mooncake import BLOCK, block_tokens, file_trace
from tailreplay.bench.traces import GENERATORS, Request, Trace, made_trace
from tailreplay.cli import main
from tailreplay.errors import InvalidRequestError

GOOD = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}


# ---- made traces


@pytest.mark.parametrize("name", GENERATORS)
def test_a_trace_is_the_same_each_time_it_is_read(name: str) -> None:
    def flat(trace: Trace) -> list[tuple[float, bytes, bytes]]:
        return [(request.at, request.prompt.tobytes(), request.output.tobytes()) for request in trace]

    trace = made_trace(name, 25, 5)
    assert flat(trace) == flat(trace)
    assert flat(trace) != flat(made_trace(name, 25, 6))
    times = [request.at for request in trace]
    assert len(times) == 25
    assert times == sorted(times)
    assert all(request.prompt.dtype == np.uint32 and len(request.prompt) and len(request.output) for request in trace)


def test_a_trace_is_made_as_it_is_read() -> None:
    endless: Iterator[Request] = GENERATORS["chats"](10_000_000, 0)
    assert [len(request.prompt) > 300 for request in itertools.islice(endless, 3)] == [True] * 3


# ---- Mooncake's format


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_blocks_with_one_id_are_the_same_tokens_and_others_differ(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl", GOOD, {**GOOD, "timestamp": 2500, "input_length": 1024}, {**GOOD, "hash_ids": [7, 9]}
    )
    first, second, third = file_trace(path)
    assert (first.at, second.at) == (0.0, 2.5)
    assert [len(request.prompt) for request in (first, second, third)] == [600, 1024, 600]
    assert [len(request.output) for request in (first, second, third)] == [5, 5, 5]
    np.testing.assert_array_equal(first.prompt, second.prompt[:600])
    np.testing.assert_array_equal(first.prompt[:BLOCK], third.prompt[:BLOCK])
    assert first.prompt[BLOCK] != third.prompt[BLOCK]
    assert first.output[0] != second.output[0]
    assert first.prompt.dtype == np.uint32


def test_block_tokens_do_not_depend_on_the_run() -> None:
    assert block_tokens(0, 3).tolist() == block_tokens(0)[:3].tolist()
    starts = {int(block_tokens(block, 1)[0]) for block in [*range(5000), -1, 1 << 60, 1 << 70]}
    assert len(starts) >= 5000


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{oops", "Line 2 of '{path}' is not JSON."),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "should be a JSON object"),
        ({"timestamp": 0, "input_length": 600, "output_length": 5}, "has no 'hash_ids'"),
        ({**GOOD, "input_length": "600"}, "'input_length' must be a whole number from 1 to 16,777,216, got \"600\""),
        ({**GOOD, "input_length": 0}, "'input_length' must be"),
        ({**GOOD, "input_length": 1e400}, "'input_length' must be"),
        ({**GOOD, "output_length": True}, "'output_length' must be a whole number from 0"),
        ({**GOOD, "output_length": -1}, "'output_length' must be"),
        ({**GOOD, "timestamp": None}, "'timestamp' must be a number of milliseconds, got null"),
        ({**GOOD, "timestamp": float("nan")}, "'timestamp' must be"),
        ({**GOOD, "hash_ids": 7}, "'hash_ids' must be a list of whole numbers, got 7"),
        ({**GOOD, "hash_ids": [7, "8"]}, "'hash_ids' must be"),
        ({**GOOD, "hash_ids": [7]}, "600 tokens are 2 blocks of 512, but there are 1 hash_ids"),
        ("", "is not JSON"),
    ],
)
def test_a_bad_line_is_one_sentence_with_its_number(
    line: object, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, line)
    assert main(["bench", "eviction", "--trace", str(path), "--sizes", "1"]) == 2
    shown = capsys.readouterr().err.splitlines()[-1]
    assert words.format(path=path) if "{path}" in words else words in shown
    assert "Line 2" in shown
    assert shown.endswith(".")


def test_bytes_that_are_not_text_are_not_json(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(InvalidRequestError, match=r"Line 1 of .* is not JSON"):
        list(file_trace(path))


def test_a_file_that_is_empty_or_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="is empty: line 1 should be a JSON object"):
        list(file_trace(write(tmp_path / "empty")))
    with pytest.raises(InvalidRequestError, match=r"cannot be read: No such file or directory\."):
        list(file_trace(tmp_path / "nothing"))
