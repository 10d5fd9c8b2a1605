"""An API key in front of everything but ``/health``."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tailreplay.metrics import Metrics
from tailreplay.server.errors import error_response

OPEN_PATHS = ("/health",)


class ApiKeyMiddleware:
    """Asks for ``Authorization: Bearer KEY`` before a request's body is read.

    Parameters
    ----------
    app : ASGI application
    key : str
        The one key that is let in.
    metrics : Metrics
        Counts those that are not.
    """

    def __init__(self, app: ASGIApp, key: str, metrics: Metrics) -> None:
        self._app = app
        self._key = key.encode()
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._knows(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        self._metrics.request("unauthorized")
        response = error_response(
            401, "The API key is missing or wrong: send it as 'Authorization: Bearer KEY'.", "invalid_api_key"
        )
        await response(scope, receive, send)

    def _knows(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # In constant time, so that timing tells nothing of the key; headers come decoded as latin-1.
        return scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode("latin-1"), self._key)
