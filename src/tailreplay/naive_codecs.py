"""Slow, plain int8 coding in float64: the oracle of `codecs`. It knows no bytes, no chunks and no rounding but its own."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK = 128
TOP = 127


def int8_codes(token: NDArray[np.float64], scales: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the nearest code of each channel, ties to even.

    Parameters
    ----------
    token : ndarray, shape (channels,)
    scales : ndarray, shape (ceil(channels / 128),)
    """
    return np.array([int(np.rint(value / scales[i // BLOCK])) for i, value in enumerate(token)], dtype=np.int64)


def int8_scale_range(token: NDArray[np.float64]) -> list[tuple[float, float]]:
    """Return between which numbers each block's scale has to lie."""
    least = [float(np.abs(token[at : at + BLOCK]).max()) / TOP for at in range(0, len(token), BLOCK)]
    return [(s, 1.001 * s + 2.0**-24) for s in least]


def int8_values(codes: NDArray[np.int64], scales: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what codes stand for, shape (channels,)."""
    return np.array([int(code) * scales[i // BLOCK] for i, code in enumerate(codes)])
