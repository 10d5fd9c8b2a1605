"""Errors that people read: each message is one sentence that says what was wrong and what would be right."""

from __future__ import annotations


class TailReplayError(Exception):
    """Base of every error that this package raises on purpose."""


class UnsupportedModelError(TailReplayError):
    """The model's architecture cannot be replayed; the message says why."""


class InvalidRequestError(TailReplayError):
    """A request is malformed (a server answers it with HTTP 400).

    Parameters
    ----------
    message : str
        One sentence for the person who sent the request.
    param : str or None
        Name of the offending request field, as in the OpenAI error object.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class CacheConfigError(TailReplayError):
    """The cache cannot be built or used with the given sizes or layout."""
