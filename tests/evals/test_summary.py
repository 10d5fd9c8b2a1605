"""Numbers of hand-made records, also of records that lack most of what there could be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tailreplay.evals.cells import Cell
from tailreplay.evals.info import TaskInfo
from tailreplay.evals.methods import label, ordered
from tailreplay.evals.rows import Row
from tailreplay.evals.summary import Summary, summarise
from tests.evals.made import TASKS, probe, random_records, record, result


def row_of(summary: Summary, method: str) -> Row:
    return next(row for row in summary.rows if row.method == method)


def cell_of(summary: Summary, task: str, method: str) -> Cell:
    return next(cell for cell in summary.cells if (cell.task, cell.method) == (task, method))


def scored(full: float, replayed: float, evidence: int | None = None) -> dict[str, Any]:
    return probe(evidence, full=result(full), replay_5=result(replayed))


def test_order_of_methods() -> None:
    names = ["kv-wiped", "replay@0.05", "zero", "full", "replay@1", "exact", "replay@0.2", "full"]
    assert ordered(names) == ("full", "exact", "replay@1", "replay@0.2", "replay@0.05", "zero", "kv-wiped")
    assert [label(name) for name in ("replay@0.05", "replay@0.005", "zero")] == [
        "replay 5%",
        "replay 0.5%",
        "zero states",
    ]


def test_score_and_retention_of_a_cell() -> None:
    records = [record("count", 0, scored(1, 1), scored(1, 0)), record("count", 1, scored(0.5, 0.5))]
    cell = cell_of(summarise(records, TASKS), "count", "replay@0.05")
    assert (cell.n, cell.documents, cell.tail) == (3, 2, 45)
    assert cell.score.value == pytest.approx(0.5)
    assert cell.retention.value == pytest.approx(0.5 / (2.5 / 3))
    assert cell.score.low == 0.5
    assert cell.retention.low == pytest.approx(0.5)
    assert cell.retention.high == pytest.approx(1)


def test_a_big_cell_weighs_no_more_than_a_small_one() -> None:
    big = [record("count", document, *[scored(1, 1)] * 10) for document in range(5)]
    small = [record("count", document, scored(1, 0), length=4000) for document in range(2)]
    easy = [record("retrieval", document, scored(1, 0.25)) for document in range(2)]
    row = row_of(summarise(big + small + easy, TASKS), "replay@0.05")
    assert (row.score.value, row.retention.value) == (0.5, 0.5)
    assert (row.score_boundary.value, row.retention_boundary.value) == (0.25, 0.25)
    assert (row.n, row.n_boundary, row.cells) == (52, 2, 2)


def test_retention_compares_over_what_both_were_measured_on() -> None:
    records = [
        record("count", 0, probe(full=result(0.8), kv_wiped=result(0.4))),
        record("chat", 0, probe(full=result(0.2)), turn=0),
    ]
    summary = summarise(records, TASKS)
    assert row_of(summary, "full").score.value == pytest.approx(0.5)
    wiped = row_of(summary, "kv-wiped")
    assert wiped.ablation
    assert (wiped.score.value, wiped.retention.value) == pytest.approx((0.4, 0.5))


def test_nll_gap_is_that_of_plain_text_if_there_is_any() -> None:
    text = probe(full=result(nll=2.0, first_nll=2.2), zero=result(nll=3.0, first_nll=4.2), replay_5=result(nll=2.1))
    other = probe(full=result(1, 1.0), zero=result(0, 2.0), replay_5=result(1, 1.5))
    both = summarise([record("text", 0, text), record("count", 0, other)], TASKS)
    row = row_of(both, "replay@0.05")
    assert (row.nll_gap_closed.value, row.nll_gap_over, row.n_nll) == (pytest.approx(0.9), "plain text", 1)
    cell = cell_of(both, "text", "zero")
    assert (cell.first_nll_over_full.value, cell.nll_over_full.value) == pytest.approx((2.0, 1.0))
    assert (cell.score.value, cell.nll_gap_closed.value) == (None, 0.0)
    row = row_of(summarise([record("count", 0, other)], TASKS), "replay@0.05")
    assert (row.nll_gap_closed.value, row.nll_gap_over) == (pytest.approx(0.5), "all tasks")


def test_inside_and_before_the_tail() -> None:
    # The tail of 45 of 900 tokens begins at token 855.
    probes = [scored(1, 1, 855), scored(1, 0, 854), scored(0, 0, 10), scored(1, 0.5, None)]
    cell = cell_of(summarise([record("count", 0, *probes)], TASKS), "count", "replay@0.05")
    assert (cell.inside.n, cell.inside.score, cell.inside.full) == (1, 1, 1)
    assert (cell.outside.n, cell.outside.score, cell.outside.full) == (2, 0, 0.5)
    full = cell_of(summarise([record("count", 0, *probes)], TASKS), "count", "full")
    assert (full.inside.n, full.outside.n, full.tail) == (0, 0, None)


def test_turns_of_conversations() -> None:
    hits = [record("chat", 0, scored(1, 1 - turn / 10), turn=turn)["hits"][0] for turn in range(3)]
    summary = summarise([record("chat", 0) | {"hits": hits}], TASKS)
    scores = {(turn.turn, turn.method): turn.score.value for turn in summary.turns}
    assert scores == {
        (turn, m): pytest.approx(s) for turn in range(3) for m, s in (("full", 1), ("replay@0.05", 1 - turn / 10))
    }


def test_state_error_is_a_mean_over_hits() -> None:
    errors = [{"zero": [1.0, 1.0], "replay@0.05": [0.2, 0.4]}, {"replay@0.05": [0.4, float("nan")]}, {}]
    records = [record("count", place, scored(1, 1), state_error=error) for place, error in enumerate(errors)]
    replayed, zero = summarise(records, TASKS).state_error
    assert (replayed.method, replayed.n, replayed.errors) == ("replay@0.05", 2, (pytest.approx(0.3), None))
    assert (zero.method, zero.n, zero.errors) == ("zero", 1, (1.0, 1.0))


def test_discriminating_tasks_lead() -> None:
    summary = summarise(random_records(2), TASKS)
    assert list(dict.fromkeys(cell.task for cell in summary.cells)) == ["count", "text", "chat", "retrieval"]
    methods = ["full", "exact", "replay@0.2", "replay@0.05", "replay@0.01", "zero", "kv-wiped"]
    assert [row.method for row in summary.rows] == methods
    assert list(summary.by_length) == [1024, 4096]
    assert summary.documents == 16


def test_keys_of_the_summary() -> None:
    row = summarise(random_records(2), TASKS).to_dict()["summary"][0]
    estimates = ("score", "retention", "nll_gap_closed", "score_boundary", "retention_boundary")
    intervals = {name + end for name in estimates for end in ("", "_low", "_high")}
    assert set(row) == intervals | {"method", "nll_gap_over", "n", "n_boundary", "n_nll", "cells", "ablation"}


def test_verdicts_that_pass() -> None:
    wipe, zero = summarise(random_records(10), TASKS).verdicts
    assert (wipe.passed, zero.passed) == (True, True)
    assert wipe.text.startswith("KV wipe: retrieval falls from 1.00 to 0.00, 0% of full prefill's")
    assert zero.text.startswith("Zero states: on discriminating tasks score falls from 0.9")


def test_verdicts_that_fail() -> None:
    probes = [probe(full=result(1), zero=result(1), kv_wiped=result(1))]
    records = [record(task, document, *probes) for task in ("count", "retrieval") for document in range(3)]
    wipe, zero = summarise(records, TASKS).verdicts
    assert (wipe.passed, zero.passed) == (False, False)
    assert "does not fall: from 1.00 to 1.00" in wipe.text


def test_retrieval_within_a_question_counts_for_the_wipe() -> None:
    tasks = {"retrieval-mid": TaskInfo("retrieval-mid", "Mid-question", discriminates=True, retrieval=True)}
    records = [record("retrieval-mid", 0, probe(full=result(1), kv_wiped=result(0.05)))]
    wipe, _ = summarise(records, tasks).verdicts
    assert wipe.passed


def test_verdicts_without_data_are_undecided() -> None:
    wipe, zero = summarise([record("count", 0, scored(1, 1))], TASKS).verdicts
    assert (wipe.passed, zero.passed) == (None, None)
    assert wipe.text == "KV wipe: retrieval not measured."
    _, zero = summarise([record("count", 0, probe(full=result(0), zero=result(0)))], TASKS).verdicts
    assert zero.passed is None
    assert "says nothing" in zero.text
    _, zero = summarise([record("count", 0, probe(full=result(1), zero=result(0)))], TASKS).verdicts
    assert zero.passed is None
    assert "no interval" in zero.text


def test_a_document_recorded_twice_counts_once() -> None:
    records = [record("count", 0, scored(1, 0)), record("count", 0, scored(1, 1))]
    cell = cell_of(summarise(records, TASKS), "count", "replay@0.05")
    assert (cell.n, cell.score.value) == (1, 1)


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(ValueError, match="Unknown task 'other'"):
        summarise([record("other", 0)], TASKS)


@pytest.mark.parametrize(
    "records",
    [
        [],
        [record("count", 0)],
        [record("count", 0, scored(0, 0))],
        [record("text", 0, probe(full=result(nll=2.0, first_nll=2.0), zero=result(nll=2.0)))],
        [record("chat", 0, probe(zero=result(1)), turn=0)],
        random_records(1, (1024,)),
        random_records(3)[:7],
    ],
    ids=["nothing", "no probe", "full is 0", "zero equals full", "no full", "one document", "a run that goes on"],
)
def test_partial_data_makes_valid_json(records: list[dict[str, Any]]) -> None:
    json.dumps(summarise(records, TASKS).to_dict(), allow_nan=False)


def test_the_same_seed_gives_the_same_numbers() -> None:
    records = random_records(4)
    assert summarise(records, TASKS, seed=1) == summarise(records, TASKS, seed=1)
    assert summarise(records, TASKS, seed=1) != summarise(records, TASKS, seed=2)
