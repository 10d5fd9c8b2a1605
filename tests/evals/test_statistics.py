"""Intervals cover what they should, documents are resampled whole, and undefined numbers are None."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tailreplay.evals.statistics import (
    Draws,
    Estimate,
    Floats,
    average,
    difference,
    estimate,
    gap_closed,
    mean,
    ratio,
    resample,
)


def draws(value: float, documents: int = 20) -> Draws:
    """Return the mean of documents that all have one value."""
    return mean(np.full(documents, value), np.arange(documents), resample(documents))


def of(values: list[float], counts: Floats) -> Draws:
    """Return the mean of one probe a document."""
    return mean(np.array(values), np.arange(len(values)), counts)


def test_counts_hold_each_resample_whole() -> None:
    counts = resample(7, seed=3, resamples=50)
    assert counts.shape == (50, 7)
    assert (counts.sum(axis=1) == 7).all()
    assert np.array_equal(counts, resample(7, seed=3, resamples=50))
    assert not np.array_equal(counts, resample(7, seed=4, resamples=50))
    assert not np.array_equal(counts, resample(7, seed=3, stratum="count/1024", resamples=50))


def test_mean_equals_a_plain_bootstrap() -> None:
    values, documents = np.array([1.0, 0.0, 0.5, math.nan, 1.0]), np.array([0, 0, 1, 1, 2])
    counts = resample(3, resamples=20)
    result = mean(values, documents, counts)
    assert result.value == pytest.approx(2.5 / 4)
    for row, got in zip(counts, result.resampled, strict=True):
        probes = [v for d, times in enumerate(row) for v in [*values[documents == d]] * int(times) if not math.isnan(v)]
        assert got == pytest.approx(np.mean(probes))


def test_interval_covers_a_known_mean() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(300):
        values = rng.normal(2, 1, 40)
        result = estimate(mean(values, np.arange(40), resample(40, seed=trial, resamples=500)))
        assert result.low is not None
        assert result.high is not None
        covered += result.low <= 2 <= result.high
    # A percentile interval of 40 documents is a little narrow: about 94%. Three standard errors are 4 points.
    assert 0.90 <= covered / 300 <= 0.98


def test_interval_covers_a_known_ratio_of_correlated_probes() -> None:
    rng = np.random.default_rng(1)
    documents = np.repeat(np.arange(40), 5)
    covered = 0
    for trial in range(300):
        hard = np.repeat(rng.uniform(0.3, 1, 40), 5)
        full = (rng.random(200) < hard).astype(np.float64)
        kept = full * (rng.random(200) < 0.8)
        counts = resample(40, seed=trial, resamples=500)
        result = estimate(ratio(mean(kept, documents, counts), mean(full, documents, counts)))
        assert result.low is not None
        assert result.high is not None
        covered += result.low <= 0.8 <= result.high
    assert 0.90 <= covered / 300 <= 0.98


def test_probes_of_one_document_widen_the_interval() -> None:
    rng = np.random.default_rng(2)
    values = np.repeat(rng.normal(0, 1, 30), 8) + rng.normal(0, 0.1, 240)
    cluster = estimate(mean(values, np.repeat(np.arange(30), 8), resample(30)))
    naive = estimate(mean(values, np.arange(240), resample(240)))
    assert cluster.value == pytest.approx(naive.value)
    assert width(cluster) > 2 * width(naive)


def test_pairing_narrows_the_interval_of_a_ratio() -> None:
    full = list(np.random.default_rng(3).uniform(0.2, 1, 30))
    kept = [0.9 * score for score in full]
    counts = resample(30)
    paired = estimate(ratio(of(kept, counts), of(full, counts)))
    unpaired = estimate(ratio(of(kept, counts), of(full, resample(30, stratum="other"))))
    assert (paired.low, paired.high) == pytest.approx((0.9, 0.9))
    assert width(unpaired) > 0.05


def test_gap_closed_by_definition() -> None:
    result = estimate(gap_closed(draws(1.2), draws(2.0), draws(1.0)))
    assert (result.value, result.low, result.high) == pytest.approx((0.8, 0.8, 0.8))
    assert gap_closed(draws(2.5), draws(2.0), draws(1.0)).value == pytest.approx(-0.5)


def test_difference_and_average() -> None:
    assert difference(draws(3.0), draws(1.0)).value == 2.0
    both = average([draws(1.0, documents=100), draws(0.0, documents=10)])
    assert (both.value, *both.resampled[:2]) == (0.5, 0.5, 0.5)


def test_the_average_of_independent_cells_is_surer_than_one() -> None:
    rng = np.random.default_rng(4)
    cells = [of(list(rng.normal(0, 1, 30)), resample(30, stratum=str(place))) for place in range(9)]
    widths = [width(estimate(cell)) for cell in cells]
    assert width(estimate(average(cells))) == pytest.approx(np.mean(widths) / 3, rel=0.2)


@pytest.mark.parametrize(
    "undefined",
    [
        ratio(draws(0.0), draws(0.0)),
        gap_closed(draws(1.0), draws(1.5), draws(1.5)),
        gap_closed(draws(1.0), draws(1.4), draws(1.5)),
        average([]),
        draws(math.nan),
        average([draws(1.0), draws(math.nan)]),
    ],
    ids=["full is 0", "zero equals full", "zero is better than full", "no cells", "no values", "a cell without values"],
)
def test_undefined_is_none(undefined: Draws) -> None:
    assert estimate(undefined) == Estimate(None, None, None)


def test_one_document_has_no_interval() -> None:
    alone = mean(np.array([1.0, 0.0, 1.0]), np.zeros(3, dtype=np.intp), resample(1))
    assert estimate(alone) == Estimate(2 / 3, None, None)
    beside = estimate(average([alone, draws(1.0)]))
    assert (beside.value, beside.low, beside.high) == (pytest.approx(5 / 6), None, None)


def test_no_interval_where_many_resamples_are_undefined() -> None:
    counts = resample(10)
    rare = of([1.0] + [0.0] * 9, counts)
    # A third of the resamples miss the one document that the full prefill gets right.
    assert estimate(ratio(rare, rare)) == Estimate(1.0, None, None)


def width(interval: Estimate) -> float:
    assert interval.low is not None
    assert interval.high is not None
    return interval.high - interval.low
