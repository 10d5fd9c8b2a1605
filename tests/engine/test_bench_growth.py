"""`tailreplay bench growth`: the model finds the rates that made the numbers, and says how far off it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tailreplay.bench.growth_model import PARTS, fitted, work_of
from tailreplay.bench.shape_costs import qwen35_4b
from tailreplay.cli import main
from tests.core import made_ttft

COSTS = qwen35_4b()
RATES = {
    "full": (4e-9, 6e-9),
    "lookup": (0.1, 3e-5),
    "copy": (0.5, 1e-7),
    "replay": (20.0, 4e-9),
    "query": (150.0, 6e-9),
}


def row(length: int, query: int = 64, **noise: float) -> dict[str, Any]:
    terms = work_of(COSTS, length, query, 0.05).terms
    found: dict[str, Any] = {**made_ttft.row(length), "query": query, "replayed": max(64, -(-length // 20))}
    for name in PARTS:
        time = sum(rate * term for rate, term in zip(RATES[name], terms[name], strict=True))
        found[f"{name}_ms"] = time * noise.get(name, 1.0)
    found["hit_ms"] = sum(found[f"{name}_ms"] for name in PARTS[1:])
    return {"model": "tiny shape, random weights", "engine": "transformers", "dtype": "float32", **found}


def work(found: dict[str, Any]) -> Any:
    return work_of(COSTS, found["length"], found["query"], found["ratio"])


def test_rates_are_found_and_hold_beyond_what_was_measured() -> None:
    growth = fitted([row(length) for length in (1024, 2048, 4096, 8192)], work)
    for name in PARTS:
        assert growth.rates[name] == pytest.approx(RATES[name], rel=1e-6)
    far = row(1 << 20)
    predicted = growth.predict(work(far))
    assert predicted["full"] == pytest.approx(far["full_ms"])
    assert predicted["hit"] == pytest.approx(far["hit_ms"])


def test_no_rate_is_below_zero_whatever_the_noise() -> None:
    # Faster at the longer prefix: a line through these points would be negative at some length.
    rows = [row(1024, copy=50.0, lookup=9.0), row(8192)]
    growth = fitted(rows, work)
    assert all(rate >= 0 for rates in growth.rates.values() for rate in rates)
    assert growth.predict(work(row(256)))["copy"] > 0


def saved(path: Path, rows: list[dict[str, Any]], device: str = "cpu") -> str:
    run = {**made_ttft.record()["run"], "device": device}
    path.write_text("".join(json.dumps({"run": run, "row": found}) + "\n" for found in rows))
    return str(path)


def test_the_command_predicts_what_it_was_not_fitted_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(length) for length in (1024, 2048, 4096)] + [row(16384, full=1.2)]
    path = saved(tmp_path / "rows", rows)
    assert main(["bench", "growth", "--from", path, "--lengths", "256", "1K", "1024K", "--json"]) == 0
    (curve,) = json.loads(capsys.readouterr().out)["curves"]
    (check,) = curve["check"]
    assert check["length"] == 16384
    assert check["full_ms"] == rows[-1]["full_ms"]
    assert [found["length"] for found in curve["modelled"]] == [1024, 1 << 20]
    assert curve["modelled"][0]["measured_full_ms"] == rows[0]["full_ms"]
    assert curve["modelled"][1]["host_bytes"] == 1024 * curve["modelled"][0]["host_bytes"]
    assert main(["bench", "growth", "--from", path]) == 0
    assert "1,048,576" in capsys.readouterr().out


def test_one_length_is_not_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "growth", "--from", saved(tmp_path / "rows", [row(1024)])]) == 2
    assert "was measured at one length only" in capsys.readouterr().err


def test_queries_of_other_lengths_are_other_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path / "rows", [row(length, query) for length in (1024, 2048) for query in (64, 512)])
    assert main(["bench", "growth", "--from", path, "--json"]) == 0
    assert [found["query"] for found in json.loads(capsys.readouterr().out)["curves"]] == [64, 512]
    path = saved(tmp_path / "two", [row(1024, query) for query in (64, 512)])
    assert main(["bench", "growth", "--from", path]) == 2
    assert "with a query of 64 was measured at one length only" in capsys.readouterr().err


def test_rows_of_ablations_alone_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path / "rows", [{**row(length), "ablation": "skip"} for length in (1024, 2048)])
    assert main(["bench", "growth", "--from", path, "--json"]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert "no rows of whole hits" in shown.err


def test_copies_beside_the_replay_count_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path / "rows", [row(length) for length in (1024, 8192)], device="cuda")
    assert main(["bench", "growth", "--from", path, "--lengths", "8K", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["curves"][0]["modelled"]
    longer = max(found["copy_ms"], found["replay_ms"])
    assert found["hit_ms"] == pytest.approx(found["lookup_ms"] + longer + found["query_ms"])


def test_tails_are_those_of_the_engines() -> None:
    # In floating point 0.07 * 100_000 is a little more than 7,000.
    for length, ratio, replayed in ((100_000, 0.07, 7000), (1000, 0.05, 64), (32, 0.05, 32)):
        assert work_of(COSTS, length, 64, ratio).terms == work_of(COSTS, length, 64, ratio, replayed).terms
