"""Asking one server the patterns' prompts, and what each request brought."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from tailreplay.bench.endpoint import Answered, Endpoint
from tailreplay.bench.patterns import PATTERNS, Answer, Draw, Prompt, Waves
from tailreplay.bench.wording import Wording

_COUNTED_SECONDS = 5.0


async def measure_server(
    endpoint: Endpoint, patterns: list[str], repeats: int, seed: int, scale: float, max_tokens: int, wording: Wording
) -> AsyncIterator[dict[str, Any]]:
    """Yield one record a pattern and repeat: what each request brought, and how the server's look-ups ended.

    Parameters
    ----------
    wording : Wording
        Knows what the server was asked before; changed.

    Raises
    ------
    EndpointError
        As soon as a request fails.
    """
    await _warm_up(endpoint, wording, Draw(seed, repeats * len(PATTERNS), scale), max_tokens)
    for repeat in range(repeats):
        for pattern in patterns:
            # A pattern's tokens do not depend on which other patterns are asked for.
            place = repeat * len(PATTERNS) + list(PATTERNS).index(pattern)
            waves = PATTERNS[pattern](Draw(seed, place, scale))
            before = await endpoint.lookups()
            requests = await ask(endpoint, wording, waves, max_tokens)
            yield {
                "server": endpoint.name,
                "pattern": pattern,
                "repeat": repeat,
                "requests": requests,
                "lookups": await _lookups(endpoint, before, requests),
                "note": wording.note,
            }


async def _warm_up(endpoint: Endpoint, wording: Wording, draw: Draw, max_tokens: int) -> None:
    """Let the server meet a prompt, a repeated one and a branch: what it sets up at the first of a kind is not measured."""
    prompt = draw(300)
    before = await endpoint.lookups()
    requests = await ask(endpoint, wording, [[(prompt,)], [(prompt,)], [(prompt, draw(100))]], max_tokens)
    await _lookups(endpoint, before, requests)


async def ask(endpoint: Endpoint, wording: Wording, waves: Waves, max_tokens: int) -> list[dict[str, Any]]:
    """Send a pattern's prompts wave by wave and return what each brought, with what an ideal cache would have had.

    Prompts of one wave count for each other, in order: an ideal cache computes what they share once.
    """
    answers: list[list[Any]] = []
    done: list[dict[str, Any]] = []
    for wave in waves:
        prompts = [_pieces(prompt, wording, answers) for prompt in wave]
        ideals = [await wording.ideal(prompt) for prompt in prompts]
        answered = await asyncio.gather(*(endpoint.complete(wording.send(prompt), max_tokens) for prompt in prompts))
        for prompt, (shared, units), each in zip(prompts, ideals, answered, strict=True):
            await wording.remember(prompt, each)
            answers.append(wording.answer(each, max_tokens, f"{len(answers)} {len(prompt)}"))
            # The same number unless the server counts otherwise: a token before the prompt, or tokens for words.
            done.append(_record(each, round(shared * each.prompt / units)))
    return done


def _pieces(prompt: Prompt, wording: Wording, answers: list[list[Any]]) -> list[Any]:
    pieces: list[Any] = []
    for part in prompt:
        pieces += answers[part.of][part.begin : part.end] if isinstance(part, Answer) else wording.start(part)
    return pieces


def _record(answered: Answered, ideal: int) -> dict[str, Any]:
    return {
        "prompt": answered.prompt,
        "generated": answered.generated,
        "ideal": ideal,
        "cached": answered.cached,
        "ttft_ms": 1000 * answered.ttft,
        "report": answered.report,
    }


async def _lookups(
    endpoint: Endpoint, before: Counter[str] | None, requests: list[dict[str, Any]]
) -> dict[str, int] | None:
    """Return how many requests hit exactly, approximately, or missed and why; None if the server is not tailreplay's."""
    reports = [request["report"] for request in requests if request["report"]]
    if reports:
        counts = Counter(
            f"misses:{report['miss_reason']}"
            if report.get("miss_reason")
            else f"hits:{'exact' if report.get('exact') else 'approximate'}"
            for report in reports
        )
        return dict(counts)
    if before is None:
        return None
    # vLLM's counters come a moment after the answers.
    deadline = time.monotonic() + _COUNTED_SECONDS
    while True:
        new = dict((await endpoint.lookups() or Counter()) - before)
        if sum(new.values()) >= len(requests) or time.monotonic() > deadline:
            return new
        await asyncio.sleep(0.05)
