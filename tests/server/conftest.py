"""One server process for the whole session, as a user would start it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from transformers import AutoTokenizer

from tailreplay.loading import BUNDLED
from tests.server.caller import Caller

MAX_QUEUE = 3
_LOG = pytest.StashKey[Path]()


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    log: Path

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])


@contextmanager
def running(log: Path, *options: str, **environment: str) -> Iterator[tuple[Server, subprocess.Popen[bytes]]]:
    """Start a server of the bundled model, wait until it is ready, and end it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tailreplay.cli", "serve", "bundled", "--port", str(port), *options]
    clean = {name: value for name, value in os.environ.items() if name != "TAILREPLAY_API_KEY"}
    with (
        log.open("w") as out,
        subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=clean | environment) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_ready(url, process, log)
            yield Server(url, log), process
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Server]:
    log = request.config.stash[_LOG] = tmp_path_factory.mktemp("server") / "log"
    # Tests look at what stands behind approximate hits: it must not change by itself.
    options = ("--min-match", "32", "--host-bytes", "256MiB", "--max-queue", str(MAX_QUEUE), "--no-repair")
    with running(log, *options) as (server, process):
        yield server
        assert process.poll() is None, "the server died:\n" + log.read_text()


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"The server ended with status {process.returncode}:\n{log.read_text()}")
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    pytest.fail(f"The server was not ready in time:\n{log.read_text()}")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Show the end of the server's log below a test that failed."""
    outcome: Any = yield
    report = outcome.get_result()
    log = item.config.stash.get(_LOG, None)
    if report.failed and log is not None:
        report.sections.append(("end of the server's log", "\n".join(log.read_text().splitlines()[-40:])))


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(BUNDLED)


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=180) as client:
        yield client


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=180) as client:
        yield client


@pytest.fixture
def caller(client: openai.OpenAI, tokenizer: Any, request: pytest.FixtureRequest) -> Caller:
    """Requests under a salt of the test's own, so that no other test's prompts are in its way."""
    return Caller(client, tokenizer, salt=request.node.nodeid)
