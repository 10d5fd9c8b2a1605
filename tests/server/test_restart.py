"""A server that is stopped or killed finds its pages again; others that share a store find them, too."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from tests.server.conftest import Server, running

PROMPT = list(range(3, 1503))
OPTIONS = ("--host-bytes", "64MiB", "--hidden-codec", "none")


def cached(server: Server, prompt: Sequence[int], **more: object) -> int:
    """Ask and return how many tokens came from the cache."""
    body = {"prompt": list(prompt), "max_tokens": 2, "temperature": 0, **more}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=180)
    answer.raise_for_status()
    tokens: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def wait_written(server: Server) -> None:
    """Wait until the metrics say that pages have been written, and that no more are coming."""
    until, last = time.monotonic() + 60, -1.0
    while time.monotonic() < until:
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        written = sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith("tailreplay_tier_total{") and '"spilled"' in line
        )
        pinned = next(
            float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("tailreplay_cache_pinned_pages ")
        )
        if written and written == last and not pinned:
            return
        last = written
        time.sleep(0.05)
    pytest.fail("Nothing was written:\n" + server.log.read_text())


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_pages_on_disk_hit_again_after_the_next_start(tmp_path: Path, end: signal.Signals) -> None:
    options = (*OPTIONS, "--tier", f"disk:{tmp_path / 'cache'}?limit=256MiB")
    with running(tmp_path / "first", *options) as (server, process):
        assert cached(server, PROMPT) == 0
        if end is signal.SIGKILL:
            wait_written(server)
        process.send_signal(end)
        process.wait(60)
    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0
    with running(tmp_path / "second", *options) as (server, _):
        # One more token, so that all of the first prompt can be reused.
        assert cached(server, [*PROMPT, 9]) == len(PROMPT)
        assert cached(server, [*PROMPT, 9], cache_salt="other") == 0
