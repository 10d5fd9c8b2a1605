"""Mooncake's native client, with what it lacks: a bounded start, errors in words, and an end that does not crash.

Found by trying release 0.3.13: starting it holds Python's global lock, for 90 s if no master answers; every call after its
`close` is a segmentation fault; its time-outs are 30 s, and set by the environment only.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from typing import Any

from tailreplay.errors import CacheConfigError
from tailreplay.tiers.base import TierError, TierFullError

INSTALL = "pip install mooncake-transfer-engine (or, without CUDA, mooncake-transfer-engine-non-cuda)"
LIBRARIES = "apt-get install libibverbs1 libnuma1 libcurl4"
CLOSE_SECONDS = 5.0
NO_SPACE, TOO_LARGE, BEING_WRITTEN, NOT_FOUND, NO_ANSWER, TIMEOUT = -200, -600, -703, -704, -900, -901
_MEANING = {
    NO_SPACE: "no memory is free: nobody lends any, or what is stored is still leased",
    TOO_LARGE: "the value is larger than the client's buffer",
    -601: "another process writes the same object",
    BEING_WRITTEN: "another process writes the same object",
    NOT_FOUND: "there is no such object",
    -706: "the object is leased to a reader",
    -800: "the process that lends its memory does not answer",
    NO_ANSWER: "the master does not answer",
    TIMEOUT: "the master did not answer in time",
}
_log = logging.getLogger("tailreplay.tiers")
# Native objects that calls still run in: destroyed under them, they take the process along.
_left_alone: list[Any] = []


class MooncakeClient:
    """Connects with the first call. Thread-safe.

    Parameters
    ----------
    master : str
        ``HOST:PORT``.
    lend_bytes : int
        Memory that this process lends to the store; 0 for a client that only reads and writes.
    buffer_bytes : int
        Memory that values pass through; none may be larger.
    protocol : str
        "tcp" or "rdma".
    device : str
        RDMA devices, separated by commas.
    host : str or None
        Address that other clients reach this process by; None: the one that the way to the master begins at.
    timeout : float
        Seconds for a connection to the master. The first client's holds for all in the process.
    """

    def __init__(
        self,
        master: str,
        lend_bytes: int,
        buffer_bytes: int,
        protocol: str,
        device: str,
        host: str | None,
        timeout: float,
    ) -> None:
        self.master = master
        self._setup = (lend_bytes, buffer_bytes, protocol, device)
        self._host = host
        self._timeout = timeout
        self._class = _library(timeout)
        self._changed = threading.Condition()
        self._connecting = threading.Lock()
        self._store: Any = None
        self._calls = 0
        self._closed = False
        self._suspect = False

    def call(self, method: str, *arguments: Any) -> Any:
        """Return what the store's `method` returns.

        Raises
        ------
        TierError
            If it is closed, or the master cannot be reached.
        """
        self._connect()
        if self._suspect:
            # The library tries for four seconds to reach a master that is gone.
            _reach(self.master, self._timeout)
            self._suspect = False
        with self._changed:
            if self._closed:
                raise TierError(f"Mooncake at {self.master} has been closed.")
            store = self._store
            self._calls += 1
        try:
            return getattr(store, method)(*arguments)
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    def check(self, code: int, doing: str, ignore: tuple[int, ...] = ()) -> None:
        """Raise if `code` is an error.

        Raises
        ------
        TierFullError
            If the store did not take a value but is well.
        TierError
            For all other errors.
        """
        if code >= 0 or code in ignore:
            return
        if code in (NO_ANSWER, TIMEOUT):
            self._suspect = True
        kind = TierFullError if code in (NO_SPACE, TOO_LARGE) else TierError
        raise kind(f"Mooncake at {self.master}, {doing}: {_MEANING.get(code, f'error {code}')}.")

    def close(self) -> None:
        """Let go of the memory and the connections; what this process lent is gone for all. Takes seconds."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            idle = self._changed.wait_for(lambda: self._calls == 0, CLOSE_SECONDS)
            store, self._store = self._store, None
        if store is None:
            return
        if not idle:
            _left_alone.append(store)
            raise TierError(f"Mooncake at {self.master} is left open: calls to it hang.")
        store.close()

    def _connect(self) -> None:
        if self._store is not None or self._closed:
            return
        with self._connecting:
            if self._store is not None or self._closed:
                return
            # Nothing that may block is left to the library, which would stop every thread of the process.
            here = _reach(self.master, self._timeout)
            lend, buffer, protocol, device = self._setup
            store = self._class()
            code = store.setup(self._host or here, "P2PHANDSHAKE", lend, buffer, protocol, device, self.master)
            if code != 0:
                raise TierError(f"Mooncake's client does not start with the master at {self.master}: error {code}.")
            with self._changed:
                if not self._closed:
                    self._store = store
                    return
            store.close()


def _reach(master: str, timeout: float) -> str:
    """Return this machine's address on the way to the master."""
    host, _, port = master.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout) as connection:
            here: str = connection.getsockname()[0]
            return here
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise TierError(f"No Mooncake master answers at {master}: {reason}.") from error


def _library(timeout: float) -> Any:
    # Read when the library is loaded, or when its first client starts; a value that somebody has set is left.
    milliseconds = str(max(1, round(timeout * 1000)))
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "1")
    os.environ.setdefault("MC_RPC_TIMEOUT_MS", milliseconds)
    os.environ.setdefault("MC_RPC_CONNECT_TIMEOUT_MS", milliseconds)
    try:
        from mooncake.store import MooncakeDistributedStore
    except ModuleNotFoundError as error:
        raise CacheConfigError(f"A cache on Mooncake needs its package: {INSTALL}.") from error
    except ImportError as error:
        raise CacheConfigError(f"Mooncake's package does not load ({error}): {LIBRARIES}.") from error
    return MooncakeDistributedStore
