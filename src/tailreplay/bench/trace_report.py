"""What a load measured: latencies, throughput and hits, overall and over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

import numpy as np

from tailreplay.bench.numbers import percentile
from tailreplay.bench.trace_load import Outcome
from tailreplay.bench.traces import Tokens
from tailreplay.sizes import format_bytes

_LATE = 0.01


def report(outcomes: Sequence[Outcome], bucket: float) -> dict[str, Any]:
    """Return the report of `outcomes`, with one entry in ``over_time`` for every `bucket` seconds.

    Hits are a share of prompt tokens; None if the server never said what it reused. The ideal is what a cache without
    limits would have reused: of everything sent before, and of answers that were there before.
    """
    ideals = ideal_tokens(outcomes)
    told = any(each.answered is not None and each.answered.cached is not None for each in outcomes)
    done = [each for each in outcomes if each.answered is not None]
    tpot = [pace for each in done if (pace := _pace(each)) is not None]
    span = max((each.ended for each in outcomes), default=0.0) - min((each.sent for each in outcomes), default=0.0)
    return {
        **_summary(outcomes, ideals, told),
        "seconds": span,
        "ttft_p95_ms": _at([each.ttft for each in done], 0.95),
        "ttft_p99_ms": _at([each.ttft for each in done], 0.99),
        "tpot_p50_ms": _at(tpot, 0.5),
        "tokens_in_per_s": _each_second(sum(len(each.prompt) for each in done), span),
        "tokens_out_per_s": _each_second(sum(each.answered.generated for each in done if each.answered), span),
        "requests_per_s": _each_second(len(done), span),
        "waited_for_answers": sum(each.due > each.arrival + _LATE for each in outcomes),
        "waited_for_a_turn": sum(each.sent > each.due + _LATE for each in outcomes),
        "errors_by_message": dict(Counter(each.error for each in outcomes if each.error).most_common()),
        "over_time": [
            {"from_s": number * bucket, **_summary(group, ideals, told)} for number, group in _buckets(outcomes, bucket)
        ],
    }


def ideal_tokens(outcomes: Iterable[Outcome]) -> dict[int, int]:
    """Return by index how many of each prompt's tokens a cache without limits would have had when it was sent."""
    ordered = sorted(outcomes, key=lambda each: (each.sent, each.index))
    wholes = [_whole(each) for each in ordered]
    ideals: dict[int, int] = {}
    for at, each in enumerate(ordered):
        known = (
            whole if other.ended <= each.sent else other.prompt
            for other, whole in zip(ordered[:at], wholes, strict=False)
        )
        shared = max((common_tokens(tokens, each.prompt) for tokens in known), default=0)
        ideals[each.index] = min(shared, len(each.prompt) - 1)
    return ideals


def _whole(outcome: Outcome) -> Tokens:
    """Return a prompt with its answer as far as that is known: its last sampled token is never computed."""
    if outcome.answered is None or not outcome.answered.tokens:
        return outcome.prompt
    return np.concatenate([outcome.prompt, np.array(outcome.answered.tokens[:-1], np.uint32)])


def common_tokens(a: Tokens, b: Tokens) -> int:
    """Return how many first tokens two sequences share."""
    length = min(len(a), len(b))
    if not length or a[0] != b[0]:
        return 0
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


def _summary(outcomes: Sequence[Outcome], ideals: dict[int, int], told: bool) -> dict[str, Any]:
    done = [each for each in outcomes if each.answered is not None]
    prompt = sum(len(each.prompt) for each in done)
    hit = sum(each.answered.cached or 0 for each in done if each.answered is not None)
    return {
        "requests": len(outcomes),
        "errors": len(outcomes) - len(done),
        "prompt_tokens": prompt,
        "hit_tokens": hit if told else None,
        "hit_share": hit / prompt if told and prompt else None,
        "ideal_share": sum(ideals[each.index] for each in done) / prompt if prompt else None,
        "ttft_p50_ms": _at([each.ttft for each in done], 0.5),
    }


def _buckets(outcomes: Sequence[Outcome], bucket: float) -> list[tuple[int, list[Outcome]]]:
    """Return the outcomes by when they were due, with the empty stretches between."""
    last = max((int(each.due // bucket) for each in outcomes), default=-1)
    return [(n, [each for each in outcomes if int(each.due // bucket) == n]) for n in range(last + 1)]


def _at(seconds: Sequence[float], share: float) -> float | None:
    if not seconds:
        return None
    return 1000 * (median(seconds) if share == 0.5 else percentile(seconds, share))


def _pace(outcome: Outcome) -> float | None:
    """Seconds between two tokens of an answer; None for an answer of one."""
    answered = outcome.answered
    if answered is None or answered.generated < 2:
        return None
    return (answered.end - answered.first) / (answered.generated - 1)


def _each_second(count: int, span: float) -> float | None:
    return count / span if span > 0 else None


# ---- tables


def lines(measured: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the overall numbers as names and texts."""
    return [
        ("requests", f"{measured['requests']}, of which {measured['errors']} failed, in {measured['seconds']:.1f} s"),
        ("TTFT p50 / p95 / p99", _joined(measured, ("ttft_p50_ms", "ttft_p95_ms", "ttft_p99_ms"), _ms)),
        ("time between tokens p50", _ms(measured["tpot_p50_ms"])),
        ("requests/s", _plain(measured["requests_per_s"])),
        ("tokens/s in / out", _joined(measured, ("tokens_in_per_s", "tokens_out_per_s"), _plain)),
        ("prompt tokens reused", _percent(measured["hit_share"]) or "not reported"),
        ("an ideal cache", _percent(measured["ideal_share"])),
        *_cache_lines(measured),
        ("waited for an earlier answer", str(measured["waited_for_answers"])),
        ("waited for a turn", str(measured["waited_for_a_turn"])),
    ]


def _cache_lines(measured: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what tailreplay's own counters add; nothing for other servers."""
    if measured.get("cache_hits") is None:
        return []
    hits, anchors = int(measured["cache_hits"]), int(measured["cache_anchors"])
    exact = _percent(measured["exact_hit_share"]) or "–"
    return [
        ("hits, exact ones", f"{hits} of {int(measured['cache_lookups'])} requests, {exact} of them exact"),
        ("hits whose replay neglected nothing", str(int(measured["cache_complete_hits"]))),
        ("hits that began with saved states", str(int(measured["cache_anchor_hits"]))),
        ("tokens replayed", f"{int(measured['cache_replayed_tokens']):,}"),
        ("cached bytes", f"{format_bytes(int(measured['cache_bytes']))}, {anchors} saved states among them"),
    ]


OVER_TIME = ("from", "requests", "failed", "TTFT p50", "reused", "ideal")


def over_time(measured: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the lines of the table of `OVER_TIME`."""
    return [
        (
            f"{each['from_s']:g} s",
            str(each["requests"]),
            str(each["errors"] or ""),
            _ms(each["ttft_p50_ms"]),
            _percent(each["hit_share"]),
            _percent(each["ideal_share"]),
        )
        for each in measured["over_time"]
    ]


def _joined(measured: dict[str, Any], names: Sequence[str], text: Callable[[float | None], str]) -> str:
    return " / ".join(text(measured[name]) or "–" for name in names)


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} ms"


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 10 else f"{value:,.0f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}%"
