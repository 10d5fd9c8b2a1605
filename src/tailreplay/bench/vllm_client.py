"""Requests to a vLLM server over HTTP, timed."""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tailreplay.errors import TailReplayError

NAME = "bench"
REQUEST_SECONDS = 900


@dataclass(frozen=True)
class Usage:
    """One request: when it was sent and answered, and its tokens."""

    begin: float
    end: float
    prompt: int
    generated: int
    cached: int


class Client:
    """Talks to the server on a port of 127.0.0.1 that serves its model as `NAME`."""

    def __init__(self, port: int) -> None:
        self.port = port

    def complete(self, prompt: Sequence[int], max_tokens: int, **options: Any) -> Usage:
        """Complete a prompt of token ids and return what it took.

        Parameters
        ----------
        options
            What the request says about the cache (``mode``, ``ratio``, ``store``).
        """
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(_body(prompt, max_tokens, options)).encode(),
            {"Content-Type": "application/json"},
        )
        begin = time.perf_counter()
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as answer:
                usage = json.load(answer)["usage"]
        except urllib.error.HTTPError as error:
            raise TailReplayError(f"The server refused a request: {error.read().decode()[:300]}") from error
        end = time.perf_counter()
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Usage(begin, end, usage["prompt_tokens"], usage["completion_tokens"], cached)

    def counter(self, name: str) -> float:
        """Return the sum over labels of one of our counters, without its prefix."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        wanted = f"vllm:tailreplay_{name}_total"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(wanted))


@dataclass
class Stream:
    """A request whose answer is read as it comes, in a thread, begun again when it has ended, until `stop`.

    Attributes
    ----------
    arrivals : list of list of float
        Times at which pieces of the answer came, one list a request.
    error : Exception or None
        What ended it early.
    """

    client: Client
    prompt: Sequence[int]
    max_tokens: int
    arrivals: list[list[float]] = field(default_factory=list)
    error: Exception | None = None

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether pieces come."""
        return bool(self.arrivals) and len(self.arrivals[-1]) > 1

    def stop(self) -> None:
        """Leave the answer where it is."""
        self._stop.set()
        self._thread.join(REQUEST_SECONDS)
        if self.error is not None:
            raise TailReplayError(f"A stream broke: {self.error}.")

    def gaps(self) -> list[tuple[float, float]]:
        """Return begin and end of the time between each two pieces of one answer."""
        return [pair for times in self.arrivals for pair in pairwise(times)]

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._read_one()
        except (OSError, http.client.HTTPException) as error:
            self.error = error

    def _read_one(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.client.port, timeout=REQUEST_SECONDS)
        body = json.dumps({**_body(self.prompt, self.max_tokens, {}), "stream": True})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise http.client.HTTPException(f"HTTP {response.status}")
        times: list[float] = []
        self.arrivals.append(times)
        while not self._stop.is_set():
            line = response.readline()
            if not line or line.startswith(b"data: [DONE]"):
                break
            if line.startswith(b"data:"):
                times.append(time.perf_counter())
        connection.close()


def _body(prompt: Sequence[int], max_tokens: int, options: dict[str, Any]) -> dict[str, Any]:
    body = {"model": NAME, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return {**body, "tailreplay": options} if options else body
