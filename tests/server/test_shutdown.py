"""A server that is told to end does not wait for long answers."""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.server.conftest import running
from tests.server.test_bad_input import refused
from tests.server.test_disconnect import LONG


def test_ends_at_once_and_tells_its_clients(tmp_path: Path) -> None:
    options = ("--replay", "exact", "--host-bytes", "64MiB", "--served-model-name", "small")
    headers = {"Authorization": "Bearer abc"}
    with (
        running(tmp_path / "log", *options, TAILREPLAY_API_KEY="abc") as (server, process),
        httpx.Client(base_url=server.url, timeout=120, headers=headers) as http,
        ThreadPoolExecutor() as pool,
    ):
        first = (tmp_path / "log").read_text().splitlines()[0]
        assert (
            first == f"tailreplay: serving small at {server.url}/v1 (mode exact, cache of 64.0 MiB for 27,008 tokens)."
        )
        refused(httpx.get(f"{server.url}/v1/models"), 401, "The API key is missing or wrong", None)
        assert http.get("/v1/models").json()["data"][0]["id"] == "small"

        with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            waiting = pool.submit(httpx.post, f"{server.url}/v1/completions", json=LONG, headers=headers, timeout=120)
            while "tailreplay_queue_length 1.0" not in http.get("/metrics").text:
                time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            *_, error, done = [line for line in lines if line]
        assert json.loads(error.removeprefix("data: "))["error"]["message"] == "The server is shutting down."
        assert done == "data: [DONE]"
        refused(waiting.result(), 503, "The server is shutting down.", None)
        assert process.wait(60) == -signal.SIGTERM
