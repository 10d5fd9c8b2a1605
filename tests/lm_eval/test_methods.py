"""Methods by name, and the report of their scores."""

from __future__ import annotations

from typing import Any

import pytest

from tailreplay import InvalidRequestError
from tailreplay.evals.lm_eval.methods import Method, parse_method, parse_methods
from tailreplay.evals.lm_eval.report import Outcome, mean_retention, rows_of
from tailreplay.evals.lm_eval.tally import Tally


def test_methods_are_expanded_by_ratio_and_named() -> None:
    methods = parse_methods(["full", "replay", "exact", "full"], [0.05, 0.125])
    assert [method.label for method in methods] == ["full", "replay 5%", "replay 12.5%", "exact"]
    assert parse_methods(["replay"], None) == [parse_method("replay", 0.05)]


@pytest.mark.parametrize(
    ("names", "ratios", "message"),
    [
        (["fast"], None, "one of full, zero, replay, exact, got 'fast'"),
        (["full", "zero"], [0.1], "not among the methods"),
        (["replay"], [0.0], r"\(0, 1\]"),
        (["replay"], [1.5], r"\(0, 1\]"),
    ],
)
def test_bad_methods_are_refused(names: list[str], ratios: list[float] | None, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        parse_methods(names, ratios)
    with pytest.raises(InvalidRequestError, match="not with 'zero'"):
        parse_method("zero", 0.1)


def outcome(name: str, metrics: dict[str, Any], higher: bool = True) -> Outcome:
    results = {
        "results": {"sea": {"alias": "sea", "sample_len": 4, **metrics}},
        "n-samples": {"sea": {"original": 9, "effective": 4}},
        "higher_is_better": {"sea": {key.split(",")[0]: higher for key in metrics}},
    }
    return Outcome(parse_method(name), results, {"sea": Tally(4, 2, 100, 80, 10)})


def retentions(first: dict[str, Any], second: dict[str, Any], higher: bool = True) -> list[float | None]:
    rows = rows_of([outcome("full", first, higher), outcome("replay", second, higher)])
    return [row.retention for row in rows]


def test_retention_is_the_share_of_full_prefills_score() -> None:
    assert retentions({"acc,none": 0.8}, {"acc,none": 0.6}) == [1.0, pytest.approx(0.75)]
    assert retentions({"word_perplexity,none": 10.0}, {"word_perplexity,none": 20.0}, higher=False) == [1.0, 0.5]
    assert retentions({"acc,none": 0.0}, {"acc,none": 0.5}) == [None, None]


def test_rows_show_each_score_once() -> None:
    metrics = {"4096,none": -1, "1024,none": 0.5, "1024_stderr,none": 0.1, "f1,strict": 0.25, "f1_stderr,strict": "N/A"}
    (first, second) = rows_of([outcome("replay", metrics)])
    assert (first.metric, first.score, first.stderr, first.samples) == ("1024", 0.5, 0.1, 4)
    assert (second.metric, second.stderr) == ("f1 (strict)", None)
    assert first.to_dict()["reused_share"] == 0.8
    assert first.retention is None
    (named,) = rows_of([outcome("full", {"score,none": 0.5, "qa_f1_score,none": 0.5})])
    assert named.metric == "qa_f1_score"
    (alone,) = rows_of([outcome("full", {"score,none": 0.5})])
    assert alone.metric == "score"


def test_the_mean_is_over_the_scores_that_can_be_compared() -> None:
    full = outcome("full", {"a,none": 0.5, "b,none": 0.0, "c,none": 0.8})
    other = outcome("replay", {"a,none": 0.25, "b,none": 0.3, "c,none": 0.8})
    rows = rows_of([full, other])
    assert mean_retention(rows, other.method) == pytest.approx(0.75)
    assert mean_retention(rows, Method("zero", other.method.reuse)) is None
