"""How long running streams wait for their next token while a long prompt arrives: a hit, or a cold one."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from tailreplay.bench.numbers import during, percentile
from tailreplay.bench.overhead import unique_prompts
from tailreplay.bench.vllm_client import Client, Stream, Usage
from tailreplay.errors import TailReplayError

_STREAM_PROMPT = 64
_START_SECONDS = 120
_STORED_SECONDS = 30


def measure_stall(arguments: argparse.Namespace, server: Client, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return a row for quiet, one for hits and one for cold prompts of the same length."""
    (prefix,) = unique_prompts(1000, 1, arguments.hit_tokens)
    queries = unique_prompts(1001, arguments.hits + 1, arguments.query)
    count = arguments.hits if arguments.cold is None else arguments.cold
    cold = unique_prompts(1002, count, arguments.hit_tokens + arguments.query)
    # The paper's replay: where a server has saved states, hits may cost less.
    replay = {"mode": "replay", "ratio": arguments.ratio, "start": "zero"}
    _store(server, prefix, queries.pop(), replay)
    room = arguments.hit_tokens + arguments.query - _STREAM_PROMPT
    streams = [Stream(server, prompt, room) for prompt in unique_prompts(1003, arguments.streams, _STREAM_PROMPT)]
    rows: list[dict[str, Any]] = []
    try:
        _wait_until_running(streams)
        say("stall: quiet …")
        begin = time.perf_counter()
        time.sleep(arguments.quiet)
        quiet = [(begin, time.perf_counter())]
        say("stall: hits …")
        before = _clocks(server)
        hits = [_arrive(server, [*prefix, *query], replay, arguments.pause) for query in queries]
        copied, replayed = (1000 * (b - a) / len(hits) for a, b in zip(before, _clocks(server), strict=True))
        if any(usage.cached != arguments.hit_tokens for usage in hits):
            raise TailReplayError(f"Hits of {arguments.hit_tokens} tokens were expected, got {hits[-1].cached}.")
        say(f"stall: {count} cold prompts …")
        colds = [_arrive(server, prompt, replay, arguments.pause) for prompt in cold]
    finally:
        for stream in streams:
            stream.stop()
    gaps = [gap for stream in streams for gap in stream.gaps()]
    rows = stall_rows(gaps, quiet, hits, colds)
    rows[1].update(copy_ms=copied, replay_ms=replayed)
    return rows


def stall_rows(
    gaps: Sequence[tuple[float, float]],
    quiet: Sequence[tuple[float, float]],
    hits: Sequence[Usage],
    colds: Sequence[Usage],
) -> list[dict[str, Any]]:
    """Return the rows of the report: gaps that share time with the quiet span, with a hit, with a cold prompt if any."""
    rows: list[dict[str, Any]] = []
    for name, spans in (
        ("quiet", quiet),
        ("hit", [(usage.begin, usage.end) for usage in hits]),
        ("cold prompt", [(usage.begin, usage.end) for usage in colds]),
    ):
        if not spans:
            continue
        lengths = [1000 * length for length in during(gaps, spans)]
        if not lengths:
            raise TailReplayError(
                f"No stream decoded while it was to be measured ({name}): use more --quiet or --hits."
            )
        rows.append(
            {
                "measure": "stall",
                "meanwhile": name,
                "gaps": len(lengths),
                "p50_ms": percentile(lengths, 0.5),
                "p99_ms": percentile(lengths, 0.99),
                "max_ms": max(lengths),
            }
        )
    for row, usages in zip(rows[1:], (hits, colds), strict=False):
        row["ratio"] = row["p99_ms"] / rows[0]["p99_ms"]
        row["ttft_ms"] = 1000 * median(usage.end - usage.begin for usage in usages)
    rows[1]["target"] = True
    return rows


def _store(server: Client, prefix: list[int], query: list[int], replay: dict[str, Any]) -> None:
    """Compute `prefix`, and come back until all of it is matched: the last page lands a step later."""
    server.complete(prefix, 1, mode="off")
    deadline = time.monotonic() + _STORED_SECONDS
    while server.complete([*prefix, *query], 1, store=False, **replay).cached < len(prefix):
        if time.monotonic() > deadline:
            raise TailReplayError(f"A prefix of {len(prefix)} tokens was not stored: raise --host-bytes.")


def _wait_until_running(streams: Sequence[Stream]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not all(stream.is_running for stream in streams):
        broken = next((stream.error for stream in streams if stream.error is not None), None)
        if broken is not None or time.monotonic() > deadline:
            raise TailReplayError(f"The streams did not start: {broken or 'nothing came in time'}.")
        time.sleep(0.05)


def _arrive(server: Client, prompt: list[int], replay: dict[str, Any], pause: float) -> Usage:
    usage = server.complete(prompt, 1, **replay)
    time.sleep(pause)
    return usage


def _clocks(server: Client) -> tuple[float, float]:
    """Seconds that the connector has spent copying and replaying since its start."""
    return server.counter("load_seconds"), server.counter("replay_seconds")
