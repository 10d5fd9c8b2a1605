"""A vLLM server that is killed, or stopped, and started again over the same disk; and two that share a store."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.server.texts import KEYS, document, question
from tests.tiers import servers
from tests.tiers.conftest import require
from tests.vllm_live.conftest import BUNDLED, Server
from tests.vllm_live.test_server import Caller


def prompts() -> list[list[int]]:
    tokenizer: Any = AutoTokenizer.from_pretrained(BUNDLED)
    text, _ = document(1, 100)
    return [tokenizer.encode(f"{text}\n{question(key)}\nAnswer: ") for key in KEYS[:3]]


def written(server: Server) -> float:
    return sum(
        value for name, value in server.metrics().items() if name.startswith("vllm:tailreplay_written_pages_total")
    )


def wait_written(server: Server, caller: Caller, ids: list[int]) -> None:
    """Wait until pages have been written, and none more come; vLLM counts in steps only, so requests go on."""
    until, last = time.monotonic() + 60, -1.0
    while not written(server) or written(server) != last:
        last = written(server)
        assert time.monotonic() < until, server.log.read_text()[-3000:]
        caller.send(ids[:40], mode="off")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_finds_its_pages_again(end: signal.Signals, tmp_path: Path) -> None:
    settings = {"host_bytes": "64MiB", "min_match": 16, "tiers": [f"disk:{tmp_path / 'cache'}?limit=256MiB"]}
    first_prompt, second_prompt, _ = prompts()
    first = Server(tmp_path / "first", settings)
    caller = Caller(first, "restart")
    caller.send(first_prompt)
    wait_written(first, caller, second_prompt)
    os.killpg(first.process.pid, end)
    first.process.wait(60)
    second = Server(tmp_path / "second", settings)
    try:
        assert Caller(second, "restart").send(second_prompt).cached > 500
        assert Caller(second, "another").send(second_prompt).cached == 0
    finally:
        second.close()


@pytest.mark.timeout(900)
def test_two_servers_share_a_store(tmp_path: Path) -> None:
    require("redis")
    store = servers.redis_server(tmp_path)
    settings = {"host_bytes": "64MiB", "min_match": 16, "tiers": [f"redis://127.0.0.1:{store.ports[0]}"], "deadline": 5}
    first_prompt, second_prompt, _ = prompts()
    both = [Server(tmp_path / name, settings) for name in ("first", "second")]
    try:
        caller = Caller(both[0], "shared")
        caller.send(first_prompt)
        wait_written(both[0], caller, second_prompt)
        assert Caller(both[1], "shared").send(second_prompt).cached > 500
        assert Caller(both[1], "another").send(second_prompt).cached == 0
    finally:
        for server in both:
            server.close()
        store.kill()
