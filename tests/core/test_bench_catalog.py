"""`tailreplay bench`: the catalog's numbers, and how a benchmark is chosen."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from types import ModuleType

import pytest

from tailreplay.bench.catalog import LONG, PAGE_SIZE, SHORT, TARGETS, fill, make_branches
from tailreplay.cli import main
from tailreplay.keys import TOKEN_BYTES

SMALL = ["--tokens", "150000", "--sequences", "40", "--siblings", "50", "--repeats", "3"]


def test_json_has_every_number_and_no_tensor_library_is_loaded() -> None:
    code = f"""
import sys
from tailreplay.cli import main
status = main(["bench", "catalog", "--json", *{SMALL}])
assert not {{"torch", "transformers"}} & set(sys.modules)
sys.exit(status)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    report = json.loads(done.stdout)
    assert (report["sequences"], report["siblings"], report["repeats"], report["page_size"]) == (40, 50, 3, PAGE_SIZE)
    assert 150_000 <= report["cached_tokens"] < 155_000
    assert report["cached_tokens"] / PAGE_SIZE <= report["pages"] < 2500
    assert all(report[name] > 0 for name in ("lookup_ms_4k", "lookup_ms_128k", "lookup_ms_siblings"))
    # A page has at least its object and its key; the ids' own 256 bytes are not counted.
    assert 150 < report["overhead_bytes_per_page"] < TARGETS["overhead_bytes_per_page"]
    assert report["targets"] == TARGETS
    assert report["met"] == {name: report[name] < limit for name, limit in TARGETS.items()}
    assert "Catalog.match" in report["included"]


def test_the_table_shows_targets_and_whether_they_are_met(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TARGETS, "lookup_ms_4k", 1e9)
    monkeypatch.setitem(TARGETS, "lookup_ms_128k", 1e-9)
    assert main(["bench", "catalog", *SMALL]) == 0
    verdicts = {line.split("  ")[0]: line.split()[-1] for line in capsys.readouterr().out.splitlines()}
    assert verdicts["lookup, prompt of 4K tokens"] == "met"
    assert verdicts["lookup, prompt of 128K tokens"] == "missed"
    assert verdicts["memory a page besides its ids"] == "met"
    assert "lookup among 50 siblings" in verdicts


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens", "1000"], "more than"),
        (["--sequences", "2"], "3 sequences"),
        (["--repeats", "0"], "one repeat"),
        (["--siblings", "0"], "one sibling"),
        (["--seed", "-1"], "seed"),
    ],
)
def test_numbers_that_are_too_small_are_one_sentence(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "catalog", *SMALL, *arguments]) == 2
    shown = capsys.readouterr().err
    assert words in shown
    assert shown.count("\n") == 1


def test_the_workload_branches_at_page_borders_and_elsewhere() -> None:
    branches = make_branches(200_000, 100, seed=1)
    assert branches == make_branches(200_000, 100, seed=1)
    assert branches != make_branches(200_000, 100, seed=2)
    assert sum(len(branch.own) for branch in branches) == 200_000 * TOKEN_BYTES
    shared = [branch.shared % PAGE_SIZE for branch in branches[2:]]
    assert shared.count(0) > 40
    assert sum(inside > 0 for inside in shared) > 40
    catalog = fill(branches)
    assert sum(page.tokens for page in catalog.resident()) >= 200_000
    assert catalog.evictions == 0
    assert (LONG, SHORT) == (131_072, 4_096)


def test_a_benchmark_is_loaded_when_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    module = ModuleType("tailreplay.bench.ttft")
    module.__dict__.update(
        add_arguments=lambda parser: parser.add_argument("--fast", action="store_true"),
        run=lambda args: calls.append(args) or 7,
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert main(["bench", "ttft", "--fast"]) == 7
    assert calls == [argparse.Namespace(benchmark="ttft", fast=True, extra=[])]


def test_help_lists_the_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "catalog" in shown
    assert "ttft" in shown
