"""A server with OpenAI's completions API: streamed requests, timed, with what it says of its cache."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from tailreplay.bench.files import require
from tailreplay.errors import InvalidRequestError, TailReplayError

_COUNTER = re.compile(
    r'^\w*:?tailreplay_(hits|misses)_total\{.*(?:provenance|reason)="([^"]*)".*\} (\S+)', re.MULTILINE
)
_SERIES = re.compile(r"^\w*:?tailreplay_(\w+?)(?:_total)?(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_START = re.compile(r'\bstart="(\w+)"')
_OTHER_SECONDS = 30  # for everything but completions


class EndpointError(TailReplayError):
    """A server is not there, refused a request or broke off an answer; one sentence with its name."""


@dataclass(frozen=True)
class Answered:
    """One request that was answered.

    Attributes
    ----------
    begin, first, end : float
        When it was sent, when its first token came, and when its last one did: `time.perf_counter`.
    prompt, generated : int
        Tokens; 0 for a prompt if the server does not say.
    cached : int or None
        Tokens of the prompt that the server did not compute; None if it does not say.
    tokens : tuple of int or None
        The answer's ids; None if the server does not say.
    report : dict or None
        tailreplay's own object, from servers that put it into streams.
    """

    begin: float
    first: float
    end: float
    prompt: int
    generated: int
    cached: int | None
    tokens: tuple[int, ...] | None
    text: str
    report: dict[str, Any] | None = None

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.first - self.begin


@dataclass
class _Stream:
    """What the chunks of one answer have said so far."""

    first: float | None = None
    last: float | None = None
    pieces: int = 0
    text: str = ""
    tokens: list[int] | None = None
    usage: dict[str, int] = field(default_factory=dict)
    cached: int | None = None
    report: dict[str, Any] | None = None

    def take(self, chunk: dict[str, Any], now: float) -> None:
        """Take note of a chunk; what is malformed raises what Python does."""
        if isinstance(chunk.get("usage"), dict):
            counts = {name: chunk["usage"].get(name) for name in ("prompt_tokens", "completion_tokens")}
            self.usage = {name: int(count) for name, count in counts.items() if count is not None}
        told = cached_tokens(chunk)
        self.cached = self.cached if told is None else told
        self.report = dict(chunk.get("tailreplay") or ()) or self.report
        for choice in chunk.get("choices") or []:
            text, ids = choice.get("text") or "", choice.get("token_ids")
            if not text and not ids and (choice.get("finish_reason") or "token_ids" in choice):
                self.last = now  # says only why the answer ended
                continue
            self.first = now if self.first is None else self.first
            self.last = now
            self.pieces += 1
            self.text += text
            if ids is not None:
                self.tokens = [*(self.tokens or []), *map(int, ids)]


def cached_tokens(chunk: dict[str, Any]) -> int | None:
    """Return what a chunk says of reused prompt tokens: OpenAI's field, or llama.cpp's timings; None if nothing."""
    details = (chunk.get("usage") or {}).get("prompt_tokens_details") or {}
    for value in (details.get("cached_tokens"), (chunk.get("timings") or {}).get("cache_n")):
        if isinstance(value, int):
            return value
    return None


def check_url(url: str) -> None:
    """Raise `InvalidRequestError` if there can be no server at `url`, before any is asked.

    Raises
    ------
    TailReplayError
        If httpx is not installed.
    """
    require("httpx")
    import httpx

    try:
        parsed = httpx.URL(url)
        good = parsed.scheme in ("http", "https") and bool(parsed.host) and (parsed.port or 1) < 1 << 16
    except (httpx.InvalidURL, ValueError):
        good = False
    if not good:
        raise InvalidRequestError(f"There can be no server at {url!r}: an address looks like http://127.0.0.1:8000.")


class Endpoint:
    """Talks to one server; use it as an asynchronous context manager.

    Parameters
    ----------
    url : str
        With or without ``/v1`` at its end.
    model : str or None
        Name in requests; None asks the server for its first.
    timeout : float
        Seconds that a request may take.
    tells : bool
        Whether silence about reused tokens means none.

    Raises
    ------
    EndpointError
        On entering if nothing answers at `url`.
    InvalidRequestError
        On entering if nothing could.
    """

    def __init__(
        self, name: str, url: str, model: str | None = None, timeout: float = 900, tells: bool = False
    ) -> None:
        self.name = name
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model or ""
        self._timeout = timeout
        self._silence = 0 if tells else None

    async def __aenter__(self) -> Endpoint:
        check_url(self.url)
        import httpx

        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # No connection is kept: servers close idle ones, which a client may notice too late.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        # No proxies of the environment: they are not part of what is measured.
        self._http = httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=_OTHER_SECONDS, limits=limits, trust_env=False
        )
        self._errors: tuple[type[Exception], ...] = (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError)
        try:
            self.model = self.model or await self._first_model()
        except BaseException:
            await self._http.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def complete(self, prompt: Sequence[int] | str, max_tokens: int) -> Answered:
        """Complete a prompt of token ids or text, always with `max_tokens` tokens where the server allows to ask for that.

        Raises
        ------
        EndpointError
            If the server refuses, breaks off, or takes too long.
        """
        body = {
            "model": self.model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        stream = _Stream()
        begin = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout):
                await self._read(body, stream)
        except self._errors as error:
            raise EndpointError(f"{self.name} broke off a request: {_words(error)}.") from error
        except TimeoutError:
            raise EndpointError(f"{self.name} did not answer a request in {self._timeout:g} seconds.") from None
        if stream.last is None:
            raise EndpointError(f"{self.name} answered a request with nothing.")
        usage, tokens = stream.usage, stream.tokens
        return Answered(
            begin,
            stream.last if stream.first is None else stream.first,
            stream.last,
            usage.get("prompt_tokens") or (0 if isinstance(prompt, str) else len(prompt)),
            usage.get("completion_tokens") or stream.pieces,
            self._silence if stream.cached is None else stream.cached,
            None if tokens is None else tuple(tokens),
            stream.text,
            stream.report,
        )

    async def tokenize(self, text: str) -> list[int] | None:
        """Return the server's own token ids of a text; None if it has no ``/tokenize`` (vLLM, SGLang and llama.cpp do)."""
        try:
            answer = await self._http.post("/tokenize", json={"model": self.model, "prompt": text, "content": text})
            ids = answer.json()["tokens"]
            return [int(each) for each in ids] if answer.status_code == 200 else None
        except self._errors:
            return None
        except (ValueError, KeyError, TypeError):
            return None

    async def lookups(self) -> Counter[str] | None:
        """Return tailreplay's counts of look-ups so far, by ``hits:`` provenance and ``misses:`` reason, if it has any."""
        try:
            answer = await self._http.get("/metrics")
        except self._errors:
            return None
        if "tailreplay_" not in answer.text:
            return None
        counts: Counter[str] = Counter()
        for kind, label, value in _COUNTER.findall(answer.text):
            counts[f"{kind}:{label}"] += round(float(value))
        return counts

    async def series(self) -> dict[str, float] | None:
        """Return all of tailreplay's counters and gauges now, if the server has any.

        They are summed over their labels, but for what replays began with: ``hit_starts:complete``.
        """
        try:
            answer = await self._http.get("/metrics")
        except self._errors:
            return None
        found: dict[str, float] = {}
        for series, labels, value in _SERIES.findall(answer.text):
            name = ":".join([series, *_START.findall(labels)])
            found[name] = found.get(name, 0.0) + float(value)
        return found or None

    async def _first_model(self) -> str:
        try:
            answer = await self._http.get("/v1/models")
            if answer.status_code != 200:
                raise EndpointError(f"{self.name} at {self.url} answers {_status(answer)}: is its API key right?")
            return str(answer.json()["data"][0]["id"])
        except self._errors as error:
            raise EndpointError(f"No server answers at {self.url} ({_words(error)}).") from error
        except (ValueError, KeyError, IndexError, TypeError):
            raise EndpointError(f"{self.name} at {self.url} names no model: give --api-model.") from None

    async def _read(self, body: dict[str, Any], stream: _Stream) -> None:
        async with self._http.stream("POST", "/v1/completions", json=body, timeout=None) as response:
            if response.status_code != 200:
                await response.aread()
                raise EndpointError(f"{self.name} refused a request: {_status(response)}{_reason(response)}.")
            async for line in response.aiter_lines():
                now = time.perf_counter()
                if line.startswith("data:") and not line.endswith("[DONE]"):
                    self._take(line.removeprefix("data:"), stream, now)

    def _take(self, data: str, stream: _Stream, now: float) -> None:
        try:
            chunk = json.loads(data)
        except ValueError:
            raise EndpointError(f"{self.name} sent a piece of an answer that is not JSON.") from None
        if not isinstance(chunk, dict) or chunk.get("error"):
            raise EndpointError(f"{self.name} broke off a request: {data.strip()[:200]}.")
        try:
            stream.take(chunk, now)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise EndpointError(f"{self.name} sent a malformed piece of an answer: {data.strip()[:200]}.") from None


def _words(error: Exception) -> str:
    return str(error).rstrip(".") or type(error).__name__


def _status(response: Any) -> str:
    return f"HTTP {response.status_code}"


def _reason(response: Any) -> str:
    """Return the message of an error's body, if it has one, on one line."""
    try:
        body = response.json()
        error = body.get("error", body)
        text = error.get("message") if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        text = response.text
    text = " ".join(str(text or "").split()).rstrip(".")[:300]
    return f", {text}" if text else ""
