"""A running job as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from tailreplay.engines.transformers.results import GenerationResult
from tailreplay.server.errors import error_of
from tailreplay.server.responses import CompletionFormat, reuse_report, usage
from tailreplay.server.worker import Ended, Event, Job, Piece


async def stream_events(
    job: Job, events: asyncio.Queue[Event], style: CompletionFormat, with_usage: bool
) -> AsyncIterator[str]:
    """Yield the events of a response, the last of them ``[DONE]``.

    The reuse report goes with the usage, or with the last chunk if no usage was asked for.
    """
    # With usage asked for, OpenAI's chunks all have the field, null in all but one.
    extra: dict[str, Any] = {"usage": None} if with_usage else {}
    opened: set[int] = set()
    results: list[GenerationResult] = []
    while not isinstance(event := await events.get(), Ended):
        choices = [] if event.index in opened else style.opening(event.index)
        opened.add(event.index)
        report: dict[str, Any] = {}
        if isinstance(event, Piece):
            choices.append(style.piece(event.index, event.text))
        else:
            results.append(event.result)
            choices.append(style.last(event.index, event.result))
            if not with_usage and len(results) == len(job.generations):
                report = {"tailreplay": reuse_report(results, job.queued)}
        *earlier, last = choices
        for choice in earlier:
            yield _event({**style.chunk([choice]), **extra})
        yield _event({**style.chunk([last]), **extra, **report})
    if event.outcome == "completed":
        if with_usage:
            totals = {"usage": usage(results), "tailreplay": reuse_report(results, job.queued)}
            yield _event({**style.chunk([]), **totals})
    else:
        yield _event(error_of(event.outcome).body())
    yield "data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"
