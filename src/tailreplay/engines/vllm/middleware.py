"""Checks what a request says about the cache before vLLM sees it, and puts it where the connector finds it."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from tailreplay.engines.vllm.repair import Repairs
from tailreplay.engines.vllm.settings import Settings, parse_options
from tailreplay.errors import InvalidRequestError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
RESET_PATH = "/reset_prefix_cache"
PATHS = ("/v1/completions", "/v1/chat/completions")


class ReuseParams:
    """ASGI middleware: ``tailreplay`` at the top of a request moves into ``kv_transfer_params``; nonsense gets HTTP 400.

    Also has the model's mean state made, and prompts that were answered approximately computed again exactly, while nobody
    waits (see `calibration` and `repair`), unless TAILREPLAY_REPAIR is 0.

    A raw vLLM server ignores wrong parameters with a warning instead, since a connector cannot refuse a request.
    """

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._repairs = Repairs(app) if os.environ.get("TAILREPLAY_REPAIR", "1") != "0" else None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in PATHS:
            await self._app(scope, receive, send)
            if self._repairs is not None and scope.get("path") == RESET_PATH:
                self._repairs.calibration.again()
            return
        body = b""
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        try:
            body = rewrite(body)
        except InvalidRequestError as error:
            await _refuse(send, error)
            return
        headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        scope = {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}
        sent = False

        async def replayed() -> Message:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        if self._repairs is None:
            await self._app(scope, replayed, send)
            return
        scope = self._repairs.named(scope, body)
        self._repairs.begun()
        try:
            await self._app(scope, replayed, self._repairs.watched(scope, send))
        finally:
            self._repairs.ended()


def rewrite(body: bytes) -> bytes:
    """Return a request body with its cache options checked and in their place; what is no JSON object stays as it is.

    Raises
    ------
    InvalidRequestError
        If the options are wrong or given twice.
    """
    try:
        request = json.loads(body)
    except ValueError:
        return body
    if not isinstance(request, dict):
        return body
    params = request.get("kv_transfer_params")
    if params is not None and not isinstance(params, dict):
        raise InvalidRequestError(f"'kv_transfer_params' must be an object, got {params!r}.", "kv_transfer_params")
    inner = (params or {}).get("tailreplay")
    outer = request.pop("tailreplay", None)
    if outer is not None and inner is not None:
        raise InvalidRequestError("Give 'tailreplay' once: at the top or in 'kv_transfer_params'.", "tailreplay")
    options = inner if outer is None else outer
    if parse_options(options, Settings()).calibrates:
        # Everybody's hits begin with what is made of it.
        raise InvalidRequestError("'calibrate' is not for clients of a server: it does that itself.", "tailreplay")
    if outer is not None:
        request["kv_transfer_params"] = {**(params or {}), "tailreplay": outer}
    return json.dumps(request).encode()


async def _refuse(send: Send, error: InvalidRequestError) -> None:
    body = json.dumps(
        {"error": {"message": str(error), "type": "invalid_request_error", "param": error.param, "code": 400}}
    ).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
