"""`tailreplay bench ttft` without models: what is asked for, turns, numbers, saved rows."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tailreplay.ablation import ABLATIONS, Ablation
from tailreplay.bench import files, ttft_report, ttft_run, ttft_saved
from tailreplay.bench.files import append, writable
from tailreplay.bench.ttft_plan import Target, TtftPlan, parse_length, parse_ratio
from tailreplay.bench.ttft_rows import PHASES, Sample, rest_of, tails_of
from tailreplay.bench.ttft_turns import measured
from tailreplay.cli import main
from tailreplay.errors import InvalidRequestError, TailReplayError
from tests.core.made_ttft import COSTS, record, records, row, samples

TARGET = Target("tiny", True, "transformers")


def plan(**changes: Any) -> TtftPlan:
    given = {"targets": (TARGET,), "lengths": (1000,), "ratios": (0.05,), "ablations": ("both",), **changes}
    return TtftPlan(**given)


class FakeEngine:
    """Notes what it is asked to do; `short` tokens of a hit are not matched."""

    costs = COSTS
    vocabulary = 50
    bandwidth = 1e10

    def __init__(self, short: int = 0) -> None:
        self.flags: dict[str, Any] = {}
        self.calls: list[Any] = []
        self._short = short

    def store(self, ids: list[int]) -> None:
        self._ids = ids
        self.calls.append("store")

    def cold(self, ids: list[int]) -> Sample:
        assert ids[: len(self._ids)] == self._ids
        assert all(3 <= token < self.vocabulary for token in ids)
        self.calls.append("cold")
        return Sample(10.0)

    def hit(self, ids: list[int], ratio: float, ablation: Ablation) -> Sample:
        self.calls.append((ratio, ablation))
        return samples(ratio, matched=len(self._ids) - self._short, replayed=50)[0]


def test_lengths_and_ratios_as_people_write_them() -> None:
    assert [parse_length(text) for text in ("1000", "8K", "32k")] == [1000, 8192, 32768]
    assert [parse_ratio(text) for text in ("5%", "0.1", "1.0", "100%")] == [0.05, 0.1, 1.0, 1.0]
    for wrong in ("0", "K", "1.5K", "-3", ""):
        with pytest.raises(ArgumentTypeError, match="8K"):
            parse_length(wrong)
    for wrong in ("0", "7", "120%", "%", "x"):
        with pytest.raises(ArgumentTypeError, match="5%"):
            parse_ratio(wrong)


def test_ablations_are_named_by_what_is_on() -> None:
    labels = {name: ablation.label for name, ablation in ABLATIONS.items()}
    assert labels == {"none": "no skip, no overlap", "skip": "skip", "overlap": "overlap", "both": "skip + overlap"}


def test_ratios_and_ablations_of_a_length_share_its_cold_runs() -> None:
    engine = FakeEngine()
    asked = plan(ratios=(0.05, 0.5), ablations=("none", "both"), repeats=2, cold_repeats=2)
    (rows,) = measured(engine, asked, lambda text: None)
    hits = [(ratio, ABLATIONS[name]) for ratio in (0.05, 0.5) for name in ("none", "both")]
    # The run that stores is the full prefill's warm-up.
    assert engine.calls == ["store", *hits, "cold", *hits, "cold", *hits]
    assert [(row["ratio"], row["ablation"]) for row in rows] == [
        (0.05, "none"), (0.05, "both"), (0.5, "none"), (0.5, "both")
    ]  # fmt: skip
    assert {(row["full_ms"], row["full_runs"], row["hit_runs"]) for row in rows} == {(10_000.0, 2, 2)}
    assert [row["speedup"] for row in rows] == [200, 200, 20, 20]


def test_fewer_cold_runs_than_hits_are_spread_over_the_turns() -> None:
    engine = FakeEngine()
    (rows,) = measured(engine, plan(repeats=4, cold_repeats=2, warmup=0), lambda text: None)
    kinds = ["hit" if isinstance(call, tuple) else call for call in engine.calls]
    assert kinds == ["store", "cold", "hit", "hit", "cold", "hit", "hit"]
    assert (rows[0]["full_runs"], rows[0]["hit_runs"]) == (2, 4)


def test_a_hit_that_is_too_short_is_no_measurement() -> None:
    with pytest.raises(TailReplayError, match="1,000 tokens was expected, and 993"):
        list(measured(FakeEngine(short=7), plan(), lambda text: None))


def test_a_row_has_spread_limits_and_phases() -> None:
    found = row(4096, 0.1)
    assert (found["full_ms"], found["full_mean_ms"], found["full_p95_ms"]) == (4096.0, 4096.0, 4505.6)
    assert found["speedup"] == found["full_ms"] / found["hit_ms"]
    assert found["limit"] == found["full_flops"] / found["hit_flops"]
    # The hit's operations would take full_ms / limit at the prefill's rate.
    assert found["vs_limit"] == pytest.approx(found["hit_ms"] / (found["full_ms"] / found["limit"]))
    assert found["copy_bytes"] == 4096 * 32 * 1024
    assert found["copy_limit_ms"] == pytest.approx(1000 * found["copy_bytes"] / 1e10)
    assert found["loaded_bytes"] == found["copy_bytes"] + found["replayed"] * 35 * 1024
    assert sum(found[f"{phase}_ms"] for phase in PHASES) == pytest.approx(found["hit_ms"], rel=1e-3)


def test_what_is_left_of_a_hit_counts_copies_beside_the_replay_once() -> None:
    assert rest_of(10.0, 1.0, 2.0, 4.0, beside=False) == 3.0
    assert rest_of(10.0, 1.0, 2.0, 4.0, beside=True) == 5.0
    assert rest_of(10.0, 1.0, 6.0, 4.0, beside=True) == 3.0
    assert rest_of(10.0, 1.0, 6.0, 4.0, beside=False) == 0.0


def test_groups_of_convolutions_replay_what_they_see() -> None:
    groups = [replace(COSTS.topology.groups[0], receptive_field=field) for field in (None, 7, 300)]
    assert tails_of(groups, 200) == [200, 7, 200]
    assert tails_of(groups, 5) == [5, 5, 5]


def test_without_the_skip_a_hit_has_more_to_compute() -> None:
    assert row(ablation="overlap")["hit_flops"] > row()["hit_flops"]
    assert row(ablation="skip")["hit_flops"] == row()["hit_flops"]
    tails = [100] * len(COSTS.topology.groups)
    extra = COSTS.replay_flops(tails, skip=False) - COSTS.replay_flops(tails)
    assert extra == 100 * sum(COSTS.layers[group.layers[-1]].ffn for group in COSTS.topology.groups)


@pytest.mark.parametrize(
    "changes", [{"query": 0}, {"repeats": 0}, {"cold_repeats": 0}, {"warmup": -1}, {"repeats": 2, "cold_repeats": 3}]
)
def test_what_cannot_be_measured_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(InvalidRequestError):
        plan(**changes).check()


def test_saved_rows_come_back_and_the_later_of_two_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    old, other, new = record(), record(length=2048), record()
    new["row"]["hit_ms"] = 1.5
    for path, kept in ((first, old), (first, other), (second, new)):
        append(path, kept)
    with second.open("a") as file:
        file.write('{"run": {"mod')  # cut off while it was written
    assert ttft_saved.load([first, second]) == [other, new]
    assert "line 2 is not a saved row" in capsys.readouterr().err
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        ttft_saved.load([tmp_path / "none"])
    (tmp_path / "empty").touch()
    with pytest.raises(InvalidRequestError, match="no saved rows"):
        ttft_saved.load([tmp_path / "empty"])


def test_odd_rows_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, odd = tmp_path / "rows", 0
    changes: dict[str, dict[str, list[Any]]] = {
        "run": {"device": [None, 1], "flags": [None, "x"], "copy_gb_s": [None, "fast"], "machine": [["a"]]},
        "row": {
            "speedup": [None, "2x", float("nan")], "ablation": [None, "all", []], "ratio": [[0.05], True],
            "hit_ms": [0], "length": [1.5, -1],
        },
    }  # fmt: skip
    with path.open("w") as file:
        file.write(json.dumps(record()) + '\n[]\n{"run": 1, "row": 2}\n')
        for part, names in changes.items():
            for name, values in names.items():
                for value in values:
                    kept = record(length=2048 + odd)
                    kept[part][name] = value
                    if value is None:
                        del kept[part][name]
                    file.write(json.dumps(kept) + "\n")
                    odd += 1
    assert ttft_saved.load([path]) == [record()]
    assert capsys.readouterr().err.count("is not a saved row and is left out.\n") == odd + 2


def test_a_row_after_one_that_was_cut_off_begins_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows"
    path.write_text('{"run": {"mod')
    append(path, record())
    append(path, record(length=2048))
    assert ttft_saved.load([path]) == [record(), record(length=2048)]
    assert "line 1 is not a saved row" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "module"), [("--png", "matplotlib"), ("--html", "matplotlib"), ("--query", "rich")])
def test_what_the_report_needs_is_missed_before_anything_is_measured(
    option: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def import_module(name: str) -> None:
        if name.startswith(module):
            raise ModuleNotFoundError(name=module)

    monkeypatch.setattr(files, "import_module", import_module)
    monkeypatch.setattr(ttft_run, "measure", lambda *arguments: pytest.fail("measured"))
    assert main(["bench", "ttft", option, "3" if option == "--query" else str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err == f"tailreplay: This benchmark needs {module}: pip install 'tailreplay[bench]'.\n"


def test_the_report_is_printed_before_files_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def picture(*arguments: Any) -> bytes:
        raise OSError("no space left")

    append(tmp_path / "rows", record())
    monkeypatch.setattr(ttft_report, "picture", picture)
    path = str(tmp_path / "picture")
    assert main(["bench", "ttft", "--from", str(tmp_path / "rows"), "--json", "--png", path]) == 2
    shown = capsys.readouterr()
    assert json.loads(shown.out)["rows"]
    assert shown.err == f"tailreplay: '{path}' could not be written: no space left.\n"


def test_a_report_of_saved_rows_needs_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, made = tmp_path / "rows.jsonl", records()
    for kept in made:
        append(saved, kept)
    assert main(["bench", "ttft", "--from", str(saved), "--json", "--png", str(tmp_path / "plots.png")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["rows"] == [kept["row"] for kept in made]
    assert [run["engine"] for run in report["runs"]] == ["transformers", "vllm"]
    assert (report["engine"], report["machine"], report["threads"]) == ("transformers, vllm", "a machine", 2)
    assert report["versions"] == {"python": "3.11", "transformers": "1", "vllm": "1"}
    assert (tmp_path / "plots.png").read_bytes().startswith(b"\x89PNG")
    assert main(["bench", "ttft", "--from", str(saved)]) == 0
    shown = capsys.readouterr().out
    assert "32,768" in shown
    assert "skip + overlap" in shown


def test_files_that_cannot_be_written_are_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for option in ("--html", "--png", "--save"):
        assert main(["bench", "ttft", option, str(tmp_path / "file" / "report")]) == 2
        assert "cannot be written" in capsys.readouterr().err
    assert writable(tmp_path / "new" / "report").parent.exists()
    assert not (tmp_path / "new" / "report").exists()
