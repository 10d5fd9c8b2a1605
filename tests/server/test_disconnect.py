"""Clients that go away free what they held, and the queue is first in, first out, and bounded.

Long answers here could run for thousands of tokens; what is waited for is an event that the server tells of, with a
deadline that only a broken server reaches.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from tests.server.conftest import MAX_QUEUE, Server
from tests.server.test_bad_input import refused, still_answers
from tests.server.test_modes import metrics
from tests.server.texts import KEYS, document, filler, question

LONG: dict[str, Any] = {
    "prompt": "It was a long way to the old house.",
    "max_tokens": 8000,
    "stop": [],
    "temperature": 0,
}
CANCELLED = 'tailreplay_requests_total{outcome="cancelled"}'


def wait_for(http: httpx.Client, wanted: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """Poll /metrics until they are as wanted."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        now = metrics(http)
        if wanted(now):
            return now
        time.sleep(0.02)
    pytest.fail(f"not reached: {metrics(http)}")


@contextmanager
def streaming(server: Server, **fields: Any) -> Iterator[Iterator[str]]:
    """Open a long stream on a connection of its own; leaving closes the connection."""
    with (
        httpx.Client(base_url=server.url, timeout=180) as client,
        client.stream("POST", "/v1/completions", json={**LONG, "stream": True, **fields}) as response,
    ):
        yield response.iter_lines()


@contextmanager
def sending(server: Server, body: bytes, missing: int = 0) -> Iterator[None]:
    """Send a request (but for the last `missing` bytes) and read nothing; leaving closes the connection."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode() + body[: len(body) - missing])
        yield


def idle(now: dict[str, float]) -> bool:
    return now["tailreplay_running"] == now["tailreplay_queue_length"] == now["tailreplay_cache_pinned_pages"] == 0


def test_leaving_a_stream_ends_it(server: Server, http: httpx.Client) -> None:
    before = metrics(http)[CANCELLED]
    with streaming(server) as lines:
        assert next(lines).startswith("data: ")
        assert metrics(http)["tailreplay_running"] == 1
    wait_for(http, lambda now: idle(now) and now[CANCELLED] == before + 1)
    still_answers(http)


def test_leaving_without_a_stream_ends_it(server: Server, http: httpx.Client) -> None:
    before = metrics(http)[CANCELLED]
    with sending(server, json.dumps(LONG).encode()):
        wait_for(http, lambda now: now["tailreplay_running"] == 1)
    wait_for(http, lambda now: idle(now) and now[CANCELLED] == before + 1)
    still_answers(http)


def test_leaving_before_the_request_is_complete(server: Server, http: httpx.Client) -> None:
    before = metrics(http)[CANCELLED]
    with sending(server, json.dumps(LONG).encode(), missing=10):
        assert metrics(http)["tailreplay_running"] == 0
    wait_for(http, lambda now: idle(now) and now[CANCELLED] == before + 1)
    still_answers(http)


def test_what_was_computed_before_leaving_is_reused(server: Server, http: httpx.Client, tokenizer: Any) -> None:
    prompt = filler(90, 12)
    text = ""
    with streaming(server, cache_salt="left", prompt=prompt) as lines:
        while len(tokenizer.encode(text)) < 20:
            event = next(line for line in lines if line)
            text += json.loads(event.removeprefix("data: "))["choices"][0]["text"]
    wait_for(http, idle)
    ids = tokenizer.encode(prompt + text)
    assert len(tokenizer.encode(prompt)) > 64
    body = {**LONG, "max_tokens": 1, "cache_salt": "left", "prompt": prompt + text, "tailreplay": {"store": False}}
    report = http.post("/v1/completions", json=body).raise_for_status().json()["tailreplay"]
    # A token is sent before it is computed: of the last one that was read nothing may be there.
    assert (report["matched"], report["stop"]) == (len(ids) - 1, "end")


def test_leaving_the_queue_frees_the_place(server: Server, http: httpx.Client) -> None:
    before = metrics(http)[CANCELLED]
    with streaming(server) as lines:
        next(lines)
        with streaming(server):
            assert metrics(http)["tailreplay_queue_length"] == 1
        # The first one still runs: the second went without ever having begun.
        now = wait_for(http, lambda now: now["tailreplay_queue_length"] == 0)
        assert now["tailreplay_running"] == 1
        assert now[CANCELLED] == before + 1
        assert next(line for line in lines if line)
    wait_for(http, idle)


def test_full_queue_refuses_and_recovers(server: Server, http: httpx.Client) -> None:
    with ExitStack() as stack:
        lines = stack.enter_context(streaming(server))
        next(lines)
        for _ in range(MAX_QUEUE):
            stack.enter_context(streaming(server))
        assert metrics(http)["tailreplay_queue_length"] == MAX_QUEUE
        error = refused(http.post("/v1/completions", json=LONG), 429, f"{MAX_QUEUE} more wait already", None)
        assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        refused(http.post("/v1/completions", json={**LONG, "stream": True}), 429, "try again later", None)
        assert http.get("/health").status_code == 200
    wait_for(http, idle)
    still_answers(http)
    assert metrics(http)['tailreplay_requests_total{outcome="queue_full"}'] >= 2


def test_requests_run_in_the_order_they_came(server: Server, http: httpx.Client) -> None:
    with ExitStack() as stack:
        with streaming(server) as first:
            next(first)
            waiting = [stack.enter_context(streaming(server, max_tokens=4)) for _ in range(MAX_QUEUE - 1)]
            last = stack.enter_context(streaming(server))
            assert metrics(http)["tailreplay_queue_length"] == MAX_QUEUE
        # The last one never ends by itself within this test, so all before it have run before its first event.
        assert next(last).startswith("data: ")
        assert metrics(http)["tailreplay_queue_length"] == 0
        for lines in waiting:
            assert list(lines)[-2:] == ["data: [DONE]", ""]
    wait_for(http, idle)


def test_clients_in_parallel_all_get_their_own_answers(server: Server) -> None:
    texts = [document(seed, sentences=14) for seed in range(80, 80 + MAX_QUEUE + 1)]

    def ask(text: str, numbers: dict[str, str]) -> int:
        right = 0
        with httpx.Client(base_url=server.url, timeout=180) as own:
            for key in KEYS[:4]:
                body = {"prompt": f"{text}\n{question(key)}\nAnswer: ", "max_tokens": 8, "temperature": 0}
                answer = own.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]["text"]
                assert answer not in {others[key] for _, others in texts if others is not numbers}
                right += answer == numbers[key]
        return right

    # As many as may run and wait together, so that none is refused.
    with ThreadPoolExecutor(len(texts)) as pool:
        assert sum(pool.map(ask, *zip(*texts, strict=True))) >= 4 * len(texts) - 2
