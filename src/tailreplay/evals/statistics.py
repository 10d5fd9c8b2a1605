"""Bootstrap by document: 95% intervals of means, of ratios of paired methods, and of the gap closed.

Probes of one document share its text, so they are not independent: documents are resampled, and all their probes go along.
All methods of a cell see the same resampled documents, which keeps comparisons paired.

A statistic is a `Draws`: its value and its resampled values. Draws are combined element by element, so the interval of a
ratio or of a mean over cells needs no formula of its own. Undefined is NaN in here and None in an `Estimate`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
Floats = NDArray[np.float64]

_PERCENTILES = (2.5, 97.5)
_DEFINED_SHARE = 0.95
_NO_GAP = 1e-9


@dataclass(frozen=True)
class Estimate:
    """A statistic and its 95% interval, as reports and JSON hold it.

    Attributes
    ----------
    value : float or None
        None if undefined.
    low, high : float or None
        None if there are fewer than two documents, or if too many resamples leave the statistic undefined.
    """

    value: float | None = None
    low: float | None = None
    high: float | None = None

    def named(self, name: str) -> dict[str, float | None]:
        """Return the entries `name`, `name_low` and `name_high`."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


@dataclass(frozen=True)
class Draws:
    """A statistic of the documents and of every resample of them; NaN where it is undefined.

    Attributes
    ----------
    value : float
    resampled : array of float64, shape (resamples,)
    """

    value: float
    resampled: Floats

    @property
    def defined(self) -> bool:
        """Whether the documents give a value."""
        return math.isfinite(self.value)


def resample(documents: int, *, seed: int = 0, stratum: str = "", resamples: int = RESAMPLES) -> Floats:
    """Return how often each resample holds each document.

    Parameters
    ----------
    documents : int
        At least one.
    seed : int, optional
    stratum : str, optional
        Name of the group of documents. Groups of different names are resampled independently, and a group in the same
        way whichever others there are.
    resamples : int, optional

    Returns
    -------
    array of float64, shape (resamples, documents)
        Whole numbers; rows sum to `documents`.
    """
    generator = np.random.default_rng([seed, zlib.crc32(stratum.encode())])
    return generator.multinomial(documents, np.full(documents, 1 / documents), size=resamples).astype(np.float64)


def mean(values: Floats, documents: NDArray[np.intp], counts: Floats) -> Draws:
    """Return the mean over probes.

    Parameters
    ----------
    values : array of float64, shape (probes,)
        NaN where a probe has no value; such probes do not count.
    documents : array of int, shape (probes,)
        Each probe's document, from 0.
    counts : array of float64, shape (resamples, documents)
        From `resample`.
    """
    present = np.isfinite(values)
    size = counts.shape[1]
    sums = np.bincount(documents[present], weights=values[present], minlength=size)
    probes = np.bincount(documents[present], minlength=size).astype(np.float64)
    value = float(sums.sum() / probes.sum()) if probes.any() else math.nan
    if np.count_nonzero(probes) < 2:
        # Resamples of one document are all alike: an interval of no width would pass for certainty.
        return Draws(value, np.full(len(counts), math.nan))
    return Draws(value, _divide(counts @ sums, counts @ probes))


def average(parts: Sequence[Draws]) -> Draws:
    """Return the unweighted mean of statistics; undefined if there are none."""
    if not parts:
        return Draws(math.nan, np.full(RESAMPLES, math.nan))
    value = math.fsum(part.value for part in parts) / len(parts)
    return Draws(value, np.mean([part.resampled for part in parts], axis=0))


def difference(left: Draws, right: Draws) -> Draws:
    """Return `left` less `right`."""
    return Draws(left.value - right.value, left.resampled - right.resampled)


def ratio(part: Draws, whole: Draws) -> Draws:
    """Return `part` / `whole`; undefined where `whole` is 0."""
    return _combine(part, whole, smallest=0.0)


def gap_closed(method: Draws, zero: Draws, full: Draws) -> Draws:
    """Return (zero - method) / (zero - full), for values that are better the lower they are.

    Undefined where zero is not above full: there is no gap to close, and a ratio to a negative one would mislead.
    """
    return _combine(difference(zero, method), difference(zero, full), smallest=_NO_GAP)


def estimate(draws: Draws) -> Estimate:
    """Return the value with its 95% percentile interval."""
    if not draws.defined:
        return Estimate()
    defined = draws.resampled[np.isfinite(draws.resampled)]
    if len(defined) < _DEFINED_SHARE * len(draws.resampled):
        return Estimate(draws.value)
    low, high = np.percentile(defined, _PERCENTILES)
    return Estimate(draws.value, float(low), float(high))


def _combine(part: Draws, whole: Draws, smallest: float) -> Draws:
    value = _divide(np.array([part.value]), np.array([whole.value]), smallest)
    return Draws(float(value[0]), _divide(part.resampled, whole.resampled, smallest))


def _divide(part: Floats, whole: Floats, smallest: float = 0.0) -> Floats:
    """Return `part` / `whole`, NaN where `whole` does not exceed `smallest`."""
    quotient = np.full(part.shape, math.nan)
    np.divide(part, whole, out=quotient, where=whole > smallest)
    return quotient
