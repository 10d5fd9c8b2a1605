"""What `tailreplay serve` says when it starts, and when it cannot."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from tailreplay.cache import PrefixCache
from tailreplay.cli import main
from tailreplay.metrics import Metrics
from tailreplay.modes import parse_replay
from tailreplay.server.app import create_app
from tailreplay.server.worker import Worker
from tests.server.conftest import Server
from tests.server.test_bad_input import refused


def test_ready_line(server: Server) -> None:
    first = server.log.read_text().splitlines()[0]
    assert (
        first
        == f"tailreplay: serving bundled at {server.url}/v1 (replay of 5%, cache of 256.0 MiB for 107,904 tokens)."
    )


def test_each_request_leaves_one_line(server: Server, http: httpx.Client) -> None:
    before = len(server.log.read_text().splitlines())
    http.post("/v1/completions", json={"prompt": "One two three.", "max_tokens": 1, "cache_salt": "line"})
    (line,) = server.log.read_text().splitlines()[before:]
    assert re.search(
        r"\d+ prompt tokens, none from the cache \(unseen_prefix\); "
        r"first token after \d+ ms( and \d+ ms in the queue)?; 1 tokens",
        line,
    )


def test_port_in_use(server: Server) -> None:
    command = [sys.executable, "-m", "tailreplay.cli", "serve", "--port", str(server.port)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert ended.stderr == f"tailreplay: Port {server.port} of 127.0.0.1 is in use: choose another with --port.\n"
    assert ended.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["./no/such/folder"], "There is no model folder './no/such/folder'"),
        (["--host-bytes", "12 parsecs"], "'12 parsecs' is not a size: write a number with a unit, like '8GiB'."),
        (["--host-bytes", "1KiB"], "smaller than one page"),
        (["--page-size", "17"], "multiple of 16 tokens, got 17."),
        (["--replay", "1.5"], "must be a number in (0, 1], got 1.5."),
        (["--replay", "fast"], "one of replay, exact, zero, off, got 'fast'."),
        (["--reuse-approximate", "9" * 5000], "reuse_approximate must be 'always', 'never' or a number of replays"),
        (["--port", "65536"], "--port must be from 0 to 65535, got 65536."),
        (["--min-match", "0"], "--min-match must be at least 1, got 0."),
        (["--max-queue", "-1"], "--max-queue must be at least 0, got -1."),
        (["--prefill-chunk", "0"], "--prefill-chunk must be at least 1, got 0."),
        (["--device", "abacus"], "Device 'abacus' cannot be used"),
    ],
)
def test_wrong_options(capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    assert main(["serve", "--port", "0", *arguments]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("tailreplay: ")
    assert text in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


@pytest.mark.parametrize(("kind", "text"), [("jamba", "not supported"), ("unheard_of", "could not be loaded")])
def test_unsupported_models(capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str, text: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert main(["serve", "--port", "0", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert kind in said
    assert text in said
    assert said.count("\n") == 1


@pytest.fixture
def guarded() -> TestClient:
    """An application that asks for a key, without a model."""
    lm: Any = SimpleNamespace(cache=PrefixCache("1MiB"), backbone=SimpleNamespace(max_tokens=64))
    metrics = Metrics()
    worker = Worker(metrics, 0)
    return TestClient(create_app(lm, worker, metrics, "some/model", "s3cret"))


@pytest.mark.parametrize("header", [None, "Bearer", "Bearer wrong", "Basic s3cret", "s3cret", "Bearer s3cret x"])
def test_wrong_key(guarded: TestClient, header: str | None) -> None:
    headers = {"Authorization": header} if header else {}
    for method, path in (("GET", "/v1/models"), ("GET", "/metrics"), ("POST", "/v1/completions"), ("GET", "/nothing")):
        response = guarded.request(method, path, headers=headers, content="{" if method == "POST" else None)
        error = refused(response, 401, "The API key is missing or wrong", None)
        assert error["code"] == "invalid_api_key"


def test_right_key(guarded: TestClient) -> None:
    headers = {"Authorization": "Bearer s3cret"}
    assert guarded.get("/v1/models", headers=headers).json()["data"][0]["id"] == "some/model"
    assert guarded.get("/v1/models/some/model", headers=headers).status_code == 200
    guarded.get("/v1/models")
    assert 'outcome="unauthorized"} 1.0' in guarded.get("/metrics", headers=headers).text


def test_requests_are_refused_while_the_worker_does_not_run() -> None:
    def stream(prompt: str, **_: Any) -> str:
        return prompt

    cache, backbone = PrefixCache("1MiB"), SimpleNamespace(max_tokens=64)
    lm: Any = SimpleNamespace(cache=cache, backbone=backbone, reuse=parse_replay(0.05), min_tail=64, stream=stream)
    metrics = Metrics()
    http = TestClient(create_app(lm, Worker(metrics, 0), metrics, "some/model"))
    error = refused(http.post("/v1/completions", json={"prompt": "Hello."}), 503, "shutting down", None)
    assert error["code"] == "closing"
    assert 'outcome="closing"} 1.0' in http.get("/metrics").text


def test_health_needs_no_key(guarded: TestClient) -> None:
    # 503, since this worker was never started: a server whose thread is gone is not well.
    assert guarded.get("/health").status_code == 503
