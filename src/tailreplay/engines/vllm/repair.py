"""Background repair in vLLM's server: prompts that were answered approximately are asked again, exactly, when nobody waits.

The server's own application is asked, so that vLLM schedules it as it does any request, and as few tokens as possible are
sampled. A request that comes meanwhile ends it at once. The scheduler's process says which requests were approximate on
the way that its metrics take; see `stats`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextlib import suppress
from typing import Any

from tailreplay.engines.vllm.calibration import Calibration

log = logging.getLogger("vllm.tailreplay")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

APPROXIMATE: deque[str] = deque(maxlen=4096)
"""vLLM's names of requests that went on from approximate states, as the metrics of this process heard of them."""
MOST_REQUESTS, MOST_BYTES = 64, 64 << 20
_IDLE_SECONDS = 0.05
_ID_HEADER = b"x-request-id"
# What a prompt that is only to be computed needs no more.
_DROPPED = (
    "best_of", "echo", "logprobs", "max_tokens", "min_tokens", "prompt_logprobs", "stop", "stream_options", "top_logprobs",
)  # fmt: skip


class Repairs:
    """Remembers what was asked, learns which of it was approximate, and asks it again. One event loop.

    Before that it asks for the model's mean state; see `calibration`.

    Parameters
    ----------
    app : callable
        vLLM's application.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._asked: OrderedDict[str, tuple[Message, bytes]] = OrderedDict()
        self._bytes = 0
        self._due: OrderedDict[str, tuple[Message, bytes]] = OrderedDict()
        self._running = 0
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.calibration = Calibration()

    def named(self, scope: Message, body: bytes) -> Message:
        """Return `scope` with a name for the request, by which vLLM will call it, and remember it."""
        headers = dict(scope["headers"])
        # A client's own name might be part of others': ours goes before it.
        name = uuid.uuid4().hex
        theirs = headers.get(_ID_HEADER, b"")
        kept = [(key, value) for key, value in scope["headers"] if key != _ID_HEADER]
        scope = {**scope, "headers": [*kept, (_ID_HEADER, b"-".join(filter(None, [name.encode(), theirs])))]}
        self._asked[name] = scope, body
        self.calibration.as_asked(scope)
        self._bytes += len(body)
        while self._asked and (len(self._asked) > MOST_REQUESTS or self._bytes > MOST_BYTES):
            self._forget(next(iter(self._asked)))
        return scope

    def watched(self, scope: Message, send: Send) -> Send:
        """Return `send`, which forgets the request of `scope` if it is refused."""

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] != 200:
                self._forget(dict(scope["headers"])[_ID_HEADER].decode("latin-1").partition("-")[0])
            await send(message)

        return sent

    def begun(self) -> None:
        """A request has come: whatever is being repaired makes room."""
        self._running += 1
        self._wanted.set()

    def ended(self) -> None:
        """A request has been answered. If it was the last, repair begins in a moment."""
        self._running -= 1
        if not self._running and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        await asyncio.sleep(_IDLE_SECONDS)
        while not self._running:
            self._learn()
            self._wanted = asyncio.Event()
            calibration = self.calibration.due()
            if calibration is not None:
                await self._calibrate(*calibration)
                continue
            if not self._due:
                return
            name, (scope, body) = self._due.popitem()
            try:
                status = await self._ask(scope, body)
            except Exception:
                log.exception("Computing a prompt again exactly failed; requests are not affected.")
                continue
            if self._wanted.is_set():
                self._due[name] = scope, body
            elif status != 200:
                log.warning("Computing a prompt again exactly failed with status %d.", status)

    async def _calibrate(self, scope: Message, body: bytes) -> None:
        try:
            status = await self._ask(scope, body)
        except Exception:
            log.exception("Making the model's mean state failed; requests are not affected.")
            status = 500
        if not self._wanted.is_set():
            self.calibration.answered(status)

    def _learn(self) -> None:
        """Find out which of the requests were approximate."""
        while APPROXIMATE:
            internal = APPROXIMATE.popleft()
            for name in reversed(self._asked):
                if name in internal:
                    scope, body = self._asked[name]
                    self._forget(name)
                    again = exactly(body)
                    if again is not None:
                        self._due[name] = scope, again
                    break
        while len(self._due) > MOST_REQUESTS or sum(len(body) for _, body in self._due.values()) > MOST_BYTES:
            self._due.popitem(last=False)

    async def _ask(self, scope: Message, body: bytes) -> int:
        """Ask the application; returns the status. Ends early, as if its client had gone, once somebody else asks."""
        wanted, sent, status = self._wanted, False, 0

        async def receive() -> Message:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": body, "more_body": False}
            await wanted.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]

        skipped = (b"content-length", _ID_HEADER)
        headers = [(key, value) for key, value in scope["headers"] if key not in skipped]
        await self._app(
            {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())], "state": {}}, receive, send
        )
        return status

    def _forget(self, name: str) -> None:
        if name in self._asked:
            self._bytes -= len(self._asked.pop(name)[1])


def exactly(body: bytes) -> bytes | None:
    """Return the request that computes the same prompt exactly and samples one token; None if there is none to compute."""
    with suppress(ValueError):
        request = json.loads(body)
        if isinstance(request, dict):
            params = request.get("kv_transfer_params") or {}
            options = {**(params.get("tailreplay") or {}), "mode": "exact"}
            if options.get("store") is False:
                return None
            for option in ("ratio", "start", "reuse_approximate"):
                options.pop(option, None)
            kept = {name: value for name, value in request.items() if name not in _DROPPED}
            limit = "max_completion_tokens" if "messages" in request else "max_tokens"
            kept |= {limit: 1, "n": 1, "stream": False, "kv_transfer_params": {**params, "tailreplay": options}}
            return json.dumps(kept).encode()
    return None


def note(names: Iterable[str]) -> None:
    """Take note of requests that went on from approximate states."""
    APPROXIMATE.extend(names)
