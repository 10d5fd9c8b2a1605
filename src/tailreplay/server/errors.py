"""Errors in the shape of OpenAI's API: one sentence, and which field it is about."""

from __future__ import annotations

import logging
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from tailreplay.errors import InvalidRequestError, TailReplayError
from tailreplay.metrics import Metrics

log = logging.getLogger("tailreplay.server")
_OUTCOMES = {401: "unauthorized", 429: "queue_full", 503: "closing"}


class ApiError(TailReplayError):
    """A request that is refused for another reason than its own shape.

    Parameters
    ----------
    status : int
        HTTP status.
    message : str
        One sentence for the person who sent the request.
    code : str or None
        Short name of the reason, for programs.
    param : str or None
        Name of the offending request field.
    """

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> dict[str, object]:
        """Return the error object of OpenAI's API."""
        return error_body(self.status, str(self), self.code, self.param)


class QueueFullError(ApiError):
    """The queue has no room for another request."""

    def __init__(self, limit: int) -> None:
        message = f"The server answers one request at a time and {limit} more wait already: try again later."
        super().__init__(429, message, "queue_full")


class ClosingError(ApiError):
    """The server is shutting down."""

    def __init__(self) -> None:
        super().__init__(503, "The server is shutting down.", "closing")


class FailedError(ApiError):
    """The request failed inside; the reason is in the log only."""

    def __init__(self) -> None:
        super().__init__(500, "The server failed to answer this request; its log says why.", "internal_error")


def error_of(outcome: str) -> ApiError:
    """Return what a client is told of its request's `outcome`, if that is any but "completed"."""
    # The client of a cancelled request is gone: nobody reads what it is told.
    return ClosingError() if outcome == "closing" else FailedError()


def error_body(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, object]:
    """Return the error object of OpenAI's API."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        kind = "rate_limit_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(status: int, message: str, code: str | None = None, param: str | None = None) -> JSONResponse:
    """Return an error as an HTTP response."""
    headers = {"WWW-Authenticate": "Bearer"} if status == HTTPStatus.UNAUTHORIZED else None
    return JSONResponse(error_body(status, message, code, param), status, headers)


def install(app: FastAPI, metrics: Metrics) -> None:
    """Answer every error of `app` in OpenAI's shape, and count it."""

    def refuse(status: int, message: str, code: str | None = None, param: str | None = None) -> JSONResponse:
        metrics.request(_OUTCOMES.get(status, "failed" if status >= 500 else "invalid"))
        log.info("refused with %d: %s", status, message)
        return error_response(status, message, code, param)

    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> Response:
        return refuse(error.status, str(error), error.code, error.param)

    @app.exception_handler(InvalidRequestError)
    async def invalid(_: Request, error: InvalidRequestError) -> Response:
        return refuse(400, str(error), None, error.param)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        texts = {
            404: f"There is nothing at {request.url.path}.",
            405: f"{request.method} is not allowed at {request.url.path}.",
        }
        return refuse(error.status_code, texts.get(error.status_code, f"{error.detail}."))

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: ClientDisconnect) -> Response:
        metrics.request("cancelled")
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(Exception)
    async def failed(_: Request, __: Exception) -> Response:
        metrics.request("failed")
        return JSONResponse(FailedError().body(), 500)
