"""The commands, run as a person runs them."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tailreplay.cli import main

Run = Callable[..., tuple[str, str]]


@pytest.fixture
def tailreplay(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command line in this process: returns (stdout, stderr) and checks the exit status."""

    def run(*arguments: str, stdin: str = "", status: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        got = main(arguments)
        out, err = capsys.readouterr()
        assert got == status, err
        return out, err

    return run


def one_sentence(text: str) -> str:
    """Return an error output, which must be a single line."""
    assert text.startswith("tailreplay: ")
    assert text.count("\n") == 1
    return text


def test_inspect_prints_bytes_and_limits_of_the_bundled_model(tailreplay: Run) -> None:
    report = json.loads(tailreplay("inspect", "--json", "--lengths", "1000", "4000", "--ratio", "0.1")[0])
    assert report["kv_bytes_per_token"] == 1024
    assert report["hidden_bytes_per_token"] == 3 * 384
    assert [group["source"] for group in report["groups"]] == ["embedding", "layer 2", "layer 5", "layer 8"]
    short, long = report["lengths"]
    assert (short["replayed"], long["replayed"]) == (100, 400)
    assert 1 < short["limit"] < long["limit"]
    assert "exact tail" in tailreplay("inspect")[0]


def test_inspect_names_heads_that_hardly_forget(tailreplay: Run) -> None:
    arguments = ("inspect", "--horizons", "--tokens", "600", "--tail", "200")
    report = json.loads(tailreplay(*arguments, "--json")[0])["horizons"]
    assert [row["layer"] for row in report["layers"]] == [0, 1, 3, 4, 6, 7, 9, 10]
    named = {(row["layer"], head) for row in report["layers"] for head in row["slow"]}
    slow = {
        (row["layer"], head)
        for row in report["layers"]
        for head, horizon in enumerate(row["horizons"])
        if horizon > 200
    }
    assert named == slow
    assert 0 < len(named) < 8
    assert all(sum(row["shares"]) == pytest.approx(1, abs=1e-3) for row in report["layers"])
    shown = " ".join(tailreplay(*arguments)[0].split())
    assert all(f"layer {layer} head {head}" in shown for layer, head in named)
    assert "horizons" not in json.loads(tailreplay("inspect", "--json")[0])


def test_generate_reuses_the_file_for_the_next_prompt(tailreplay: Run, tmp_path: Path) -> None:
    (tmp_path / "doc.txt").write_text("The special magic number for apple is 48213. " + "She reads a book. " * 60)
    question = "\nQuestion: What is the special magic number for apple?\nAnswer: "
    done = tailreplay("generate", "-f", str(tmp_path / "doc.txt"), "-p", question, "--then", question, "--json")[0]
    first, second = (json.loads(line) for line in done.splitlines())
    assert first["text"] == second["text"] == "48213"
    assert first["reuse"]["miss_reason"] == "unseen_prefix"
    assert second["reuse"]["matched"] == second["reuse"]["prompt_tokens"] - 1
    shown, notes = tailreplay("generate", "-f", str(tmp_path / "doc.txt"), stdin=question)
    assert shown == "48213\n"
    assert "nothing reused" in notes


def test_the_demo_shows_every_method_and_draws_a_picture(tailreplay: Run, tmp_path: Path) -> None:
    picture = tmp_path / "demo.png"
    shown, _ = tailreplay("demo", "--tokens", "800", "--questions", "2", "--out", str(picture))
    for method in ("full", "zero", "replay 5%", "exact"):
        assert method in shown
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bench_kernels_times_the_library_and_the_kernels(tailreplay: Run) -> None:
    small = ("--lengths", "2", "9", "--heads", "2", "--width", "16", "--threads", "1", "--repeats", "1")
    done, _ = tailreplay("bench", "kernels", *small, "--json")
    rows = json.loads(done)
    assert [(row["what"], row["tokens"]) for row in rows[:5]] == [
        ("delta rule", 2),
        ("convolution", 2),
        ("one token", 2),
        ("delta rule", 9),
        ("convolution", 9),
    ]
    assert len(rows) == 10
    assert all(row["ratio"] == row["library_ms"] / row["kernel_ms"] for row in rows)
    assert "convolution" in tailreplay("bench", "kernels", *small)[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "kernels", "--repeats", "0"], "at least 1"),
        (["inspect", "/no/such/model"], "no model folder"),
        (["inspect", "--ratio", "0"], "(0, 1]"),
        (["inspect", "--lengths", "0"], "at least one token"),
        (["inspect", "--horizons", "--tail", "0"], "--tail at least 1"),
        (["bench", "adaptive", "--errors", "2"], "errors in (0, 1]"),
        (["bench", "adaptive", "--length", "1"], "at least 1024"),
        (["bench", "adaptive", "--length", "9000"], "takes at most 8,192"),
        (["bench", "partial_anchors", "--left", "1"], "must lie in (0, 1)"),
        (["bench", "partial_anchors", "--length", "64", "--every", "1"], "512 or more"),
        (["bench", "partial_anchors", "--length", "9000"], "takes at most 8,192"),
        (["bench", "partial_anchors", "--ratio", "nan"], "(0, 1]"),
        (["generate", "-p", "x", "--replay", "1.5"], "(0, 1]"),
        (["generate", "-p", "x", "--replay", "abc"], "must be one of"),
        (["generate", "-p", "x", "--max-new-tokens", "0"], "at least 1"),
        (["generate", "-p", "x", "-f", "/no/such/file"], "cannot be read"),
        (["generate", "-p", "x", "--host-bytes", "1KiB"], "smaller than one page"),
        (["generate", "-p", "x", "--host-bytes", "lots"], "not a size"),
        (["generate", "-p", ""], "empty"),
        (["demo", "--tokens", "10"], "at least"),
        (["demo", "--questions", "0"], "1 to"),
        (["demo", "--out", "picture.txt"], "must be a .png"),
        (["demo", "--out", "/proc/none/picture.png"], "cannot be written"),
        (["generate", "-p", "x", "--device", "gpu"], "cannot be used"),
        (["inspect", "--dtype", "int99"], "not a dtype"),
        (["bench", "ttft", "--shape", "round"], "Unknown shape"),
        (["bench", "ttft", "--shape", "bundled", "--lengths", "8K"], "takes at most 8,192 tokens"),
        (["bench", "ttft", "--shape", "tiny", "--cold-repeats", "9"], "not be more than --repeats"),
        (["bench", "ttft", "--from", "/no/such/file"], "cannot be read"),
    ],
)
def test_bad_input_gets_one_sentence_and_a_status(tailreplay: Run, arguments: list[str], message: str) -> None:
    assert message in one_sentence(tailreplay(*arguments, status=2)[1])
