"""`tailreplay eval` as people run it: one run a session, gone on with, reported, and refused for bad input."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tailreplay.cli import main
from tailreplay.commands import eval as command
from tailreplay.errors import TailReplayError
from tailreplay.evals.records import RunFolder
from tailreplay.evals.workers import collected
from tailreplay.loading import BUNDLED

TASKS = ["--tasks", "count", "document_qa", "--lengths", "1024", "--methods", "replay@0.05", "--samples", "20"]
REFUSED = {
    "unknown task": (["--tasks", "nope"], "There is no task 'nope'"),
    "unknown method": (["--methods", "magic"], "There is no method 'magic'"),
    "no ratio": (["--methods", "replay@"], "There is no method 'replay@'"),
    "ratio of nothing": (["--methods", "replay@0"], "must be a number in (0, 1], got 0"),
    "ratio above one": (["--methods", "replay@1.5"], "must be a number in (0, 1], got 1.5"),
    "ratio that is none": (["--methods", "replay@nan"], "must be a number in (0, 1], got nan"),
    "too long": (["--lengths", "1024", "99999999"], "got a length of 99999999"),
    "too short": (["--lengths", "64"], "at least 1024 tokens, got 64"),
    "no samples": (["--samples", "0"], "--samples must be at least 1"),
    "no workers": (["--workers", "0"], "--workers must be at least 1"),
    "no model": (["/no/such/model"], "There is no model folder '/no/such/model'"),
    "no text": (["--text", "/no/such/text"], "The text '/no/such/text' cannot be read"),
    "no size": (["--host-bytes", "many"], "'many' is not a size"),
    "no dtype": (["--dtype", "int7"], "'int7' is not a dtype"),
    "text too short for the length": (["--lengths", "1024", "60000"], "got a length of 60000"),
    "no folder": (["--out", "/dev/null/out"], "cannot be written"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run's folder."""
    out = tmp_path_factory.mktemp("eval") / "run"
    assert main(["eval", *TASKS, "--workers", "2", "--out", str(out)]) == 0
    return out


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading any model fails."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("tailreplay.evals.workers.Measurer.__init__", refuse)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("no_model")
def test_bad_input_is_one_sentence_before_any_model_is_loaded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, message = REFUSED[name]
    assert main(["eval", *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert len(printed.err.strip().splitlines()) == 1
    assert not printed.out


@pytest.mark.usefixtures("no_model")
def test_a_model_without_linear_layers_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = AutoConfig.from_pretrained(BUNDLED)
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    config.save_pretrained(tmp_path / "dense")
    assert main(["eval", str(tmp_path / "dense"), "--lengths", "1024", "--out", str(tmp_path / "out")]) == 2
    assert "has no linear layers" in capsys.readouterr().err


def test_a_run_leaves_tables_page_picture_and_data(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", *TASKS, "--out", str(finished)]) == 0
    printed = capsys.readouterr().out
    assert "running count" in printed
    assert "KV wipe" in printed
    assert "Zero states" in printed
    assert (finished / "report.html").read_text(encoding="utf-8").startswith("<!")
    assert (finished / "retention.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((finished / "summary.json").read_text(encoding="utf-8"))["documents"] == 4


def test_json_has_a_row_for_each_method(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", *TASKS, "--out", str(finished), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = {row["method"]: row for row in report["summary"]}
    assert list(rows) == ["full", "replay@0.05", "zero", "kv-wiped"]
    assert all({"score", "retention", "nll_gap_closed"} <= set(row) for row in rows.values())
    assert rows["full"]["retention"] == 1.0
    assert report["settings"]["model"] == "bundled"


def test_a_finished_run_measures_nothing_again(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tailreplay.evals.workers.Measurer.measure", lambda *_: pytest.fail("measured again"))
    assert main(["eval", *TASKS, "--out", str(finished), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["documents"] == 4


def test_a_run_that_was_broken_off_goes_on_to_the_same_records(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "broken"
    shutil.copytree(finished, out)
    records = (finished / "records.jsonl").read_bytes()
    first, second, *_ = records.splitlines(keepends=True)
    # A crash in the middle of a write.
    (out / "records.jsonl").write_bytes(first + second[: len(second) // 2])
    assert main(["eval", *TASKS, "--out", str(out), "--workers", "2"]) == 0
    settings = json.loads((out / "settings.json").read_text(encoding="utf-8"))
    again, whole = (sorted(RunFolder(path, settings).records(), key=json.dumps) for path in (out, finished))
    assert again == whole


def test_a_folder_of_another_run_is_refused(
    finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (finished / "records.jsonl").read_bytes()
    assert main(["eval", *TASKS, "--seed", "7", "--out", str(finished)]) == 2
    assert "holds a run with another seed" in capsys.readouterr().err
    assert (finished / "records.jsonl").read_bytes() == before


def test_a_cache_that_is_too_small_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*TASKS, "--workers", "1", "--host-bytes", "256KiB", "--out", str(tmp_path)]
    assert main(["eval", *arguments]) == 2
    assert "give it more room with --host-bytes" in capsys.readouterr().err


def test_every_cell_gets_its_first_document_before_any_gets_its_second() -> None:
    plan = command.make_plan(command.parser().parse_args(["--samples", "30", "--lengths", "2048", "1024"]))
    jobs = command.missing(plan, [{"task": "prose", "length": 1024, "document": 1}])
    assert ("prose", 1024, 1) not in jobs
    assert [index for _, _, index in jobs] == sorted(index for _, _, index in jobs)
    assert len(jobs) == len(set(jobs)) == sum(count for _, _, count in plan.cells()) - 1


def test_a_worker_that_dies_is_said_and_loses_nobody_elses_work() -> None:
    def submit(_: Any, job: tuple[str, int, int]) -> Future[dict[str, Any]]:
        future: Future[dict[str, Any]] = Future()
        if job[2] == 2:
            future.set_exception(BrokenProcessPool("killed"))
        else:
            future.set_result({"document": job[2]})
        return future

    found: list[int] = []
    records = collected(submit, [("count", 1024, index) for index in range(9)], 4)
    with pytest.raises(TailReplayError, match="A worker process died"):
        found.extend(record["document"] for record in records)
    assert sorted(found)[:3] == [0, 1, 3]


@pytest.mark.parametrize("content", ["[]", "null", "{", ""])
def test_a_folder_with_damaged_settings_is_refused(
    finished: Path, tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "settings.json").write_text(content, encoding="utf-8")
    assert main(["eval", *TASKS, "--out", str(tmp_path / "run")]) == 2
    assert "cannot be used for this run" in capsys.readouterr().err


def test_lines_that_are_no_records_are_measured_again(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    path = tmp_path / "run" / "records.jsonl"
    path.write_bytes(b"[]\n\xff\n{}\n" + path.read_bytes())
    settings = json.loads((finished / "settings.json").read_text(encoding="utf-8"))
    assert len(RunFolder(tmp_path / "run", settings).records()) == 4


def test_a_conversation_that_lost_its_pages_is_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--tasks",
        "chat",
        "--lengths",
        "1024",
        "--samples",
        "1",
        "--host-bytes",
        "256KiB",
        "--out",
        str(tmp_path),
    ]
    assert main(["eval", *arguments, "--workers", "1"]) == 2
    assert "give it more room with --host-bytes" in capsys.readouterr().err
