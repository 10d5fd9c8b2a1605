"""From a checked request to a running job and its response."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response, StreamingResponse
from jinja2 import TemplateError

from tailreplay.engines.transformers import HybridLM
from tailreplay.engines.transformers.prompts import Prompt
from tailreplay.errors import InvalidRequestError
from tailreplay.server.errors import ApiError, error_of
from tailreplay.server.responses import ChatFormat, CompletionFormat
from tailreplay.server.reuse import parse_cache_wish
from tailreplay.server.schema import ChatRequest, CommonRequest, CompletionRequest, parse_body, parse_json
from tailreplay.server.streaming import stream_events
from tailreplay.server.worker import Ended, Event, Finished, Job, Worker

# OpenAI's default for completions; a chat ends by itself, and the limit only stops one that does not.
COMPLETION_TOKENS = 16
CHAT_TOKENS = 1024


class Service:
    """Answers completion requests with one model.

    Parameters
    ----------
    lm : HybridLM
        With the server's default mode.
    worker : Worker
        Runs the jobs.
    name : str
        The model's name in the API.
    """

    def __init__(self, lm: HybridLM, worker: Worker, name: str) -> None:
        self.lm = lm
        self.worker = worker
        self.name = name

    async def complete(self, request: Request) -> Response:
        """Answer ``/v1/completions``."""
        body = parse_json(await request.body())
        wanted = parse_body(CompletionRequest, body)
        return await self._answer(
            request, body, wanted, CompletionFormat(self.name), COMPLETION_TOKENS, lambda: list(wanted.prompt)
        )

    async def chat(self, request: Request) -> Response:
        """Answer ``/v1/chat/completions``."""
        body = parse_json(await request.body())
        wanted = parse_body(ChatRequest, body)
        return await self._answer(
            request, body, wanted, ChatFormat(self.name), CHAT_TOKENS, lambda: [self._render(wanted)]
        )

    def check_model(self, name: str | None) -> None:
        """Raise `ApiError` unless `name` is the model's, or left out."""
        if name is not None and name != self.name:
            message = f"There is no model {name!r} here, only {self.name!r}."
            raise ApiError(404, message, "model_not_found", "model")

    def _render(self, wanted: ChatRequest) -> list[int]:
        try:
            return self.lm.encode_chat([message.for_template() for message in wanted.messages])
        except TemplateError as error:
            raise InvalidRequestError(
                f"The model's chat template refuses these messages: {error}.", "messages"
            ) from None

    async def _answer(
        self,
        request: Request,
        body: dict[str, Any],
        wanted: CommonRequest,
        style: CompletionFormat,
        default_tokens: int,
        prompts: Callable[[], list[Prompt]],
    ) -> Response:
        self.check_model(wanted.model)
        wish = parse_cache_wish(body, self.lm.reuse, self.lm.min_tail)
        cancelled = threading.Event()
        options: dict[str, Any] = {"replay": wish.reuse, "salt": wish.salt, "store": wish.store, "cancel": cancelled}
        options.update(wanted.sampling(default_tokens))
        # On another thread, since a long text takes a while to tokenise; nothing runs yet, but bad input is refused.
        generations = await run_in_threadpool(lambda: [self.lm.stream(prompt, **options) for prompt in prompts()])
        events: asyncio.Queue[Event] = asyncio.Queue()
        job = Job(generations, cancelled, to_loop(events))
        self.worker.submit(job)
        watch = asyncio.create_task(self._cancel_when_gone(request, job))
        if wanted.stream:
            stream = self._stream(job, events, style, wanted.wants_usage, watch)
            return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        try:
            return await self._whole(job, events, style)
        finally:
            watch.cancel()
            self.worker.cancel(job)

    async def _stream(
        self,
        job: Job,
        events: asyncio.Queue[Event],
        style: CompletionFormat,
        with_usage: bool,
        watch: asyncio.Task[None],
    ) -> AsyncIterator[str]:
        try:
            async for text in stream_events(job, events, style, with_usage):
                yield text
        finally:
            watch.cancel()
            self.worker.cancel(job)

    async def _whole(self, job: Job, events: asyncio.Queue[Event], style: CompletionFormat) -> Response:
        results = []
        while not isinstance(event := await events.get(), Ended):
            if isinstance(event, Finished):
                results.append(event.result)
        if event.outcome == "completed":
            return JSONResponse(style.whole(results, job.queued))
        error = error_of(event.outcome)
        return JSONResponse(error.body(), error.status)

    async def _cancel_when_gone(self, request: Request, job: Job) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.worker.cancel(job)


def to_loop(events: asyncio.Queue[Event]) -> Callable[[Event], None]:
    """Return a function that puts an event from any thread into a queue of the running loop; it never raises."""
    loop = asyncio.get_running_loop()

    def emit(event: Event) -> None:
        # After the loop has been closed (a second Ctrl+C) nobody waits for the event. No use to ask first: it may be
        # closed between the answer and the call.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(events.put_nowait, event)

    return emit
