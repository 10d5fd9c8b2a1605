"""A vLLM server of a benchmark's own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tailreplay.bench.vllm_client import NAME, Client
from tailreplay.errors import TailReplayError

READY_SECONDS = 300
_LOG_LINES = 40


def without_connector(command: Sequence[str]) -> list[str]:
    """Return a server's command line (see `launch.server_command`) with the connector taken out and all else the same."""
    kept: list[str] = []
    skip = False
    for argument in command:
        if not skip and argument not in ("--kv-transfer-config", "--middleware"):
            kept.append(argument)
        skip = not skip and argument in ("--kv-transfer-config", "--middleware")
    return kept


class VllmServer(Client):
    """A server on 127.0.0.1 that ends with the ``with`` block.

    Parameters
    ----------
    model : str
        Folder or hub id.
    settings : dict or None
        The connector's; None starts a server without it.
    extra : sequence of str
        More arguments for vLLM.

    Raises
    ------
    TailReplayError
        If it is not ready in time; the end of its log goes to stderr.
    """

    def __init__(self, model: str, settings: dict[str, Any] | None, extra: Sequence[str]) -> None:
        import torch

        from tailreplay.engines.vllm.launch import environment, server_command

        self._folder = Path(tempfile.mkdtemp(prefix="tailreplay-bench-"))
        self._log = self._folder / "log"
        super().__init__(_free_port())
        cpu = not torch.cuda.is_available()
        command = server_command(model, NAME, "127.0.0.1", self.port, settings or {}, extra, cpu)
        if settings is None:
            command = without_connector(command)
        with self._log.open("w") as out:
            self._process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=environment(os.environ), start_new_session=True
            )

    def __enter__(self) -> VllmServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is not None and kind is not KeyboardInterrupt:
            print("\n".join(self._log.read_text().splitlines()[-_LOG_LINES:]), file=sys.stderr)
        self.close()

    def wait(self) -> None:
        """Return when the server answers."""
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            status = self._process.poll()
            if status is not None:
                raise TailReplayError(f"The vLLM server ended with status {status}; the end of its log is above.")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2).close()
                return
            except OSError:
                time.sleep(0.2)
        raise TailReplayError(
            f"The vLLM server was not ready after {READY_SECONDS} seconds; the end of its log is above."
        )

    def close(self) -> None:
        """End the server with its processes."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
