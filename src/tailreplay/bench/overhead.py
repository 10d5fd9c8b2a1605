"""Throughput of a server with the connector against one without it, on prompts that share nothing."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

from tailreplay.bench.vllm_client import Client
from tailreplay.errors import TailReplayError

VOCABULARY = 1000
# vLLM's processes spin for a second after their last message, on cores that the other server needs.
_SETTLE_SECONDS = 1.5


def measure_overhead(
    arguments: argparse.Namespace, ours: Client, plain: Client, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Drive the two in turn and return one row each; the ratio is the median over pairs of rounds.

    The rounds of a pair have the same prompts, and each pair begins with the other server, so that drift of the machine
    meets both.
    """
    rates: dict[str, list[float]] = {"plain": [], "tailreplay": []}
    servers = {"plain": plain, "tailreplay": ours}
    for turn in range(arguments.rounds + 1):
        prompts = unique_prompts(turn, arguments.requests, arguments.prompt)
        for name in sorted(servers, reverse=turn % 2 == 0):
            time.sleep(_SETTLE_SECONDS)
            rate = _round(servers[name], prompts, arguments.concurrency, arguments.generate)
            if turn:  # the first pair warms up
                rates[name].append(rate)
            say(f"overhead, round {turn} of {arguments.rounds}: {name} {rate:.0f} tokens/s")
    return overhead_rows(rates["plain"], rates["tailreplay"])


def unique_prompts(seed: int, count: int, tokens: int) -> list[list[int]]:
    """Return prompts of random token ids; no two of any seeds share a prefix worth matching."""
    draw = random.Random(f"prompts {seed}")
    return [[draw.randrange(3, VOCABULARY) for _ in range(tokens)] for _ in range(count)]


def overhead_rows(plain: Sequence[float], ours: Sequence[float]) -> list[dict[str, Any]]:
    """Return the rows of the report for the tokens a second of each round, in pairs."""
    ratios = [b / a for a, b in zip(plain, ours, strict=True)]
    shared = {"measure": "overhead", "rounds": len(ratios)}
    return [
        {**shared, "server": "plain", "tokens_per_s": median(plain), "all": list(plain)},
        {
            **shared,
            "server": "tailreplay",
            "tokens_per_s": median(ours),
            "all": list(ours),
            "ratio": median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
        },
    ]


def _round(server: Client, prompts: list[list[int]], concurrency: int, generate: int) -> float:
    with ThreadPoolExecutor(concurrency) as pool:
        done = list(pool.map(lambda prompt: server.complete(prompt, generate), prompts))
    if any(usage.cached for usage in done):
        raise TailReplayError("Prompts that share nothing were found in the cache: the measurement means nothing.")
    seconds = max(usage.end for usage in done) - min(usage.begin for usage in done)
    return sum(usage.prompt + usage.generated for usage in done) / seconds
