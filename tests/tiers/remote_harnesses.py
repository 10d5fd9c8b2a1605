"""How the tiers on servers are opened, broken and mended for `contract.py`. One server serves all examples."""

from __future__ import annotations

import atexit
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tailreplay.tiers.base import Tier, TierError, Usage
from tailreplay.tiers.guard import Guarded
from tailreplay.tiers.mooncake import MooncakeTier
from tailreplay.tiers.redis import RedisTier
from tests.tiers import servers
from tests.tiers.contract import Harness

DELAY = 0.003


@cache
def redis_port() -> int:
    """Return the port of a server that lasts as long as the process."""
    return _kept(servers.redis_server(Path(tempfile.mkdtemp(prefix="tailreplay-redis-"))))


@cache
def mooncake_port() -> int:
    """Return the port of a master that lasts as long as the process."""
    return _kept(servers.mooncake_server(Path(tempfile.mkdtemp(prefix="tailreplay-mooncake-"))))


def _kept(server: servers.Server) -> int:
    atexit.register(server.kill)
    return server.ports[0]


class Uncounted(RedisTier):
    """Its usage is the server's own, which is not that of the pages alone."""

    def usage(self) -> Usage:
        return Usage(None, None, None, super().usage().evictions)


class RedisHarness(Harness):
    """A server that refuses, is slow, is full, or is not there."""

    faults = ("gone", "delay", "full")
    persists = True

    def __init__(self) -> None:
        self.admin = RedisTier(f"redis://127.0.0.1:{redis_port()}/1")._client
        self.admin.flushdb()

    def open(self) -> Tier:
        self.plain = Uncounted(f"redis://127.0.0.1:{redis_port()}/1")
        return self.plain

    def break_(self, fault: str) -> None:
        if fault == "delay":
            self.admin.client_pause(3)
        elif fault == "full":
            self.admin.config_set("maxmemory-policy", "noeviction")
            self.admin.config_set("maxmemory", 1 << 20)
        else:
            self.move(servers.free_port())

    def mend(self) -> None:
        self.admin.config_set("maxmemory", 64 << 20)
        self.admin.config_set("maxmemory-policy", "allkeys-lru")
        self.move(redis_port())

    def move(self, port: int) -> None:
        pool = self.plain._client.connection_pool
        pool.connection_kwargs["port"] = port
        pool.disconnect()
        pool.reset()

    def corrupt(self, key: bytes, part: str, change: Callable[[bytes], bytes]) -> bool:
        stored = self.plain._header(key) if part == "header" else self.plain._part(key, part)
        value = self.admin.get(stored)
        if value is None:
            return False
        self.admin.set(stored, change(value))
        return True

    def destroy(self) -> None:
        self.admin.flushdb()


class GuardedHarness(RedisHarness):
    """The same behind the guard, whose back-off is over as soon as somebody asks."""

    def open(self) -> Tier:
        super().open()
        ticks = iter(range(0, 10**9, 100))
        return Guarded(self.plain, deadline=30.0, batch_bytes=50_000, clock=lambda: float(next(ticks)))


class Shared(MooncakeTier):
    """Closing the client of every example would take a second each."""

    def close(self) -> None:
        pass


@cache
def mooncake_tier() -> Shared:
    """Return the tier of all examples; it lends the memory."""
    made = Shared(f"127.0.0.1:{mooncake_port()}", lend="64MiB", buffer="16MiB")
    atexit.register(made._client.close)
    return made


class MooncakeHarness(Harness):
    """A client whose calls fail, are slow, or find no room."""

    faults = ("gone", "delay", "full")

    def __init__(self) -> None:
        self.tier = mooncake_tier()
        self.call = type(self.tier._client).call
        self.mend()
        self.tier._client.call("remove_all", True)

    def open(self) -> Tier:
        return self.tier

    def break_(self, fault: str) -> None:
        client = self.tier._client

        def call(method: str, *arguments: Any) -> Any:
            if fault == "delay":
                time.sleep(DELAY)
            if fault == "gone":
                raise TierError("made up")
            return -200 if fault == "full" and method == "put_batch" else self.call(client, method, *arguments)

        client.call = call  # type: ignore[method-assign]

    def mend(self) -> None:
        vars(self.tier._client).pop("call", None)

    def corrupt(self, key: bytes, part: str, change: Callable[[bytes], bytes]) -> bool:
        client = self.tier._client
        stored = self.tier._header(key) if part == "header" else self.tier._part(key, part)
        value = client.call("get", stored)
        if not value:
            return False
        client.call("remove", stored, True)
        client.call("put", stored, change(value))
        return True
