"""A proxy that counts round trips: how often bytes go up after bytes came down."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from types import TracebackType


class CountingProxy:
    """Stands between a client and a port of 127.0.0.1, for one connection at a time or several."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._turns = 0
        self._upwards = False
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def trips(self, call: Callable[[], object]) -> int:
        """Return how many round trips `call` takes."""
        with self._lock:
            self._turns, self._upwards = 0, False
        call()
        return self._turns

    def __enter__(self) -> CountingProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            threading.Thread(target=self._pump, args=(near, far, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, False), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, upwards: bool) -> None:
        while True:
            try:
                data = source.recv(1 << 16)
                if data:
                    self._turn(upwards)
                    target.sendall(data)
            except OSError:
                data = b""
            if not data:
                target.close()
                return

    def _turn(self, upwards: bool) -> None:
        with self._lock:
            self._turns += upwards and not self._upwards
            self._upwards = upwards
