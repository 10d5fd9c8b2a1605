"""`tailreplay bench starts`: one small run, gone on with; its rows, verdicts and picture from made records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tailreplay.bench.starts import method_names
from tailreplay.bench.starts_picture import line_of
from tailreplay.bench.starts_rows import StartRow, rows_of
from tailreplay.bench.starts_table import grids_of, verdict_lines
from tailreplay.cli import main
from tailreplay.costs import CostModel, LayerCost
from tailreplay.evals.document import Document, Hit
from tailreplay.evals.methods import parse_methods
from tailreplay.topology import Topology

COSTS = CostModel(
    Topology.from_layer_types(["linear_attention", "full_attention", "linear_attention"]),
    (LayerCost(10.0, 5.0), LayerCost(8.0, 5.0, 2.0), LayerCost(10.0, 5.0)),
    head=100.0,
    kv_bytes=64,
    hidden_bytes=(32,),
    state_bytes=1024,
)
NAMES = ["replay@0.1", "carried@0.1/64", "mean@0.1", "recompute@0.1", "anchored/64"]
KL = {"full": 0.0, "zero": 0.5, "replay@0.1": 0.02, "carried@0.1/64": 0.004, "mean@0.1": 0.012, "recompute@0.1": 0.02}


def hit(task: str, matched: int) -> dict[str, Any]:
    """A hit as it is recorded; the third head of four is the one that is wrong."""
    methods = parse_methods(NAMES)
    starts = {m.name: m.start for m in methods if m.start}
    results = {
        m.name: {
            "score": None,
            "nll": 3 + KL.get(m.name, 0),
            "first_nll": 3.0,
            "kl": KL.get(m.name, 0),
            "first_kl": 0.0,
        }
        if task == "prose"
        else {"score": float(m.name not in ("zero", "replay@0.1")), "nll": 1.0}
        for m in methods
    }
    tails = {"zero": 0, "replay@0.1": matched // 10} | {name: start.longest(matched) for name, start in starts.items()}
    return {
        "matched": matched,
        "turn": None,
        "tails": tails,
        "state_error": {},
        "anchors": {name: start.anchor_of(matched) for name, start in starts.items() if start.anchored},
        "head_norm": [4.0] * 5,
        "head_error": {name: [1.0, 1.0, 1.0, 1.0, 12.0 if name == "replay@0.1" else 1.0] for name in tails},
        "probes": [{"evidence": matched - 5, "results": results}],
    }


@pytest.fixture(scope="module")
def rows() -> dict[str, StartRow]:
    records = [
        {"task": task, "length": 1024, "document": d, "hits": [hit(task, 800 + 20 * d)]}
        for task in ("prose", "count")
        for d in range(3)
    ]
    return {row.method: row for row in rows_of(records, COSTS)}


def test_rows_say_where_the_anchor_was_and_what_a_replay_costs(rows: dict[str, StartRow]) -> None:
    assert list(rows) == ["zero", *NAMES]
    carried, paper, recomputed = rows["carried@0.1/64"], rows["replay@0.1"], rows["recompute@0.1"]
    assert (paper.start, paper.ratio, paper.anchor, paper.distance) == ("zero", 0.1, None, None)
    assert (carried.start, carried.anchor, carried.distance) == ("carried", "64", 820 - 704)
    assert carried.replayed == paper.replayed == 82
    assert rows["anchored/64"].replayed == pytest.approx((32 + 52 + 8) / 3)  # from 768, 768 and 832
    assert carried.flops == paper.flops < recomputed.flops < COSTS.prefill_flops(0, 820)
    assert recomputed.flops == pytest.approx(
        sum(COSTS.prefill_flops(m - m // 10, m) - COSTS.head for m in (800, 820, 840)) / 3
    )
    assert (recomputed.token_bytes, paper.token_bytes, carried.token_bytes) == (64, 96, 96 + 1024 / 64)


def test_rows_say_how_wrong_the_states_are_and_which_share_four_heads_hold(rows: dict[str, StartRow]) -> None:
    assert rows["replay@0.1"].state_error == pytest.approx((16 / 20) ** 0.5)
    assert rows["replay@0.1"].worst_heads == pytest.approx(15 / 16)
    assert rows["mean@0.1"].worst_heads == pytest.approx(4 / 5)


def test_quality_is_compared_with_full_prefill(rows: dict[str, StartRow]) -> None:
    carried, paper = rows["carried@0.1/64"], rows["replay@0.1"]
    assert (carried.kl.value, carried.nll_gap.value) == (0.004, pytest.approx(0.004))
    assert (carried.median_share, carried.worse) == (pytest.approx(0.2), (0, 3))
    assert (rows["anchored/64"].median_share, paper.worse) == (None, None)
    assert (carried.retention.value, paper.retention.value) == (1.0, 0.0)
    assert paper.inside == (3, 0.0, 1.0)
    assert paper.outside == (0, None, None)


def test_verdicts_compare_at_equal_tokens(rows: dict[str, StartRow]) -> None:
    lines = verdict_lines(list(rows.values()))
    assert len(lines) == 2
    assert any("carried, anchor 64" in line and "0.20 of the paper's" in line and "0.5 holds" in line for line in lines)
    assert any("mean" in line and "0.60 of the paper's" in line and "does not hold" in line for line in lines)
    (grid,) = grids_of(list(rows.values()))
    assert len(grid.rows) == len(rows)


def test_a_line_of_the_picture_has_one_anchor(rows: dict[str, StartRow]) -> None:
    assert [row.method for row in line_of(list(rows.values()), "carried")] == ["carried@0.1/64"]
    assert [row.method for row in line_of(list(rows.values()), "mean")] == ["mean@0.1"]


def test_every_budget_is_compared_at_the_first_anchor() -> None:
    names = method_names([0.05, 0.1], ["512", "50%"])
    assert {"carried@0.1/512", "mixed@0.05/50%", "decayed@0.05/50%", "recompute@0.1", "anchored/50%"} <= set(names)
    assert not {"carried@0.1/50%", "decayed@0.1/512"} & set(names)
    assert len(names) == len(set(names))
    assert "blended@0.1/512" in method_names([0.1], ["512"], ["blended"])


@pytest.mark.parametrize(("count", "kept"), [(4, [0, 3, 6, 9]), (10, list(range(10))), (1, [0]), (99, list(range(10)))])
def test_hits_are_thinned_evenly(count: int, kept: list[int]) -> None:
    document = Document((), tuple(Hit(at, ()) for at in range(10)))
    assert [one.at for one in document.thinned(count).hits] == kept


def test_a_small_run_leaves_rows_page_and_picture_and_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / f"starts.{name}" for name in ("jsonl", "png", "html")}
    arguments = [
        "bench",
        "starts",
        "--tasks",
        "count",
        "--lengths",
        "1024",
        "--samples",
        "1",
        "--ratios",
        "0.05",
        "--hits",
        "2",
    ]
    arguments += ["--anchors", "256", "--workers", "1", "--out", str(tmp_path / "run"), "--save", str(files["jsonl"])]
    assert main([*arguments, "--png", str(files["png"]), "--html", str(files["html"])]) == 0
    assert "1,024 tokens" in capsys.readouterr().out
    rows = [json.loads(line) for line in files["jsonl"].read_text(encoding="utf-8").splitlines()]
    assert {row["start"] for row in rows} == {
        "none",
        "zero",
        "anchored",
        "carried",
        "mixed",
        "decayed",
        "mean",
        "recompute",
    }
    assert next(row for row in rows if row["start"] == "anchored")["state_error"] < 1e-3
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert files["html"].read_text(encoding="utf-8").startswith("<!")
    monkeypatch.setattr("tailreplay.evals.workers.Measurer.measure", lambda *_: pytest.fail("measured again"))
    assert main([*arguments, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == len(rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--anchors", "0"], "at least one token apart, got 0"),
        (["--anchors", "near"], "There is no method 'anchored/near'"),
        (["--ratios", "1.5"], "must be a number in (0, 1], got 1.5"),
        (["--workers", "0"], "--workers must be at least 1"),
        (["--lengths", "5"], "at least 1024 tokens, got 5"),
        (["--png", "/dev/null/x.png"], "cannot be written"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "starts", "--out", str(tmp_path / "run"), *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert len(printed.err.strip().splitlines()) == 1
