"""A trace made ready for one server: lengths that fit, tokens that it has, arrival times at the wanted rate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from tailreplay.bench.mooncake import file_trace
from tailreplay.bench.patterns import FIRST_TOKEN
from tailreplay.bench.traces import GENERATORS, Request, Tokens, made_trace
from tailreplay.errors import InvalidRequestError

_TRIES = 30


def prepared(
    name: str, requests: int, seed: int, most: int, vocabulary: int, rate: float, poisson: bool = False
) -> list[Request]:
    """Return the first `requests` requests of a trace, ready to be sent.

    Parameters
    ----------
    name : str
        One of `GENERATORS`, or a file in Mooncake's format.
    most : int
        Tokens that a prompt and its answer may have. Where some have more, all lengths are scaled by one factor.
    vocabulary : int
        Token ids are taken modulo what lies between the special ones and this.
    rate : float
        Requests a second.
    poisson : bool
        Whether arrivals are drawn anew; else the trace's own times are stretched to `rate`.
    """
    made = _fitting(name, requests, seed, most)
    times = arrivals([request.at for request in made], rate, seed if poisson else None)
    return [
        replace(request, at=at, prompt=mapped(request.prompt, vocabulary), output=mapped(request.output, vocabulary))
        for at, request in zip(times, made, strict=True)
    ]


def arrivals(times: Sequence[float], rate: float, seed: int | None = None) -> list[float]:
    """Return times from 0 on at `rate` a second on average: those given, stretched, or a Poisson process of `seed`."""
    if seed is not None:
        gaps = np.random.default_rng(seed).exponential(1 / rate, size=len(times))
        return [float(at) for at in np.cumsum(gaps) - gaps[0]]
    span = times[-1] - times[0]
    factor = (len(times) - 1) / rate / span if span > 0 else 0.0
    return [(at - times[0]) * factor for at in times]


def mapped(tokens: Tokens, vocabulary: int) -> Tokens:
    """Return token ids below `vocabulary`, none of the first few, equal where they were equal."""
    return (tokens % np.uint32(vocabulary - FIRST_TOKEN) + np.uint32(FIRST_TOKEN)).astype(np.uint32)


def thinned(tokens: Tokens, scale: float) -> Tokens:
    """Return every ``1 / scale``-th token: what two sequences share at their beginning they still share."""
    kept = max(int(len(tokens) * scale), min(len(tokens), 1))
    return tokens[np.minimum((np.arange(kept) / scale).astype(np.int64), len(tokens) - 1)] if kept else tokens


def _fitting(name: str, requests: int, seed: int, most: int) -> list[Request]:
    if name not in GENERATORS:
        made = list(islice(file_trace(name), requests))
        if _longest(made) <= most:
            return made
        scale = (most - 1) / _longest(made)
        return [replace(each, prompt=thinned(each.prompt, scale), output=thinned(each.output, scale)) for each in made]
    scale = 1.0
    for _ in range(_TRIES):
        made = list(made_trace(name, requests, seed, scale))
        if _longest(made) <= most:
            return made
        # Other lengths are other draws, so the longest may be another request.
        scale *= 0.99 * most / _longest(made)
    raise InvalidRequestError(f"The trace '{name}' cannot be made to fit {most} tokens: use a larger --max-prompt.")


def _longest(requests: Iterable[Request]) -> int:
    return max(len(request.prompt) + len(request.output) for request in requests)
