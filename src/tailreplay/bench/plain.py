"""What a machine can do without a cache, to compare with: copy memory, read a file, send over a socket."""

from __future__ import annotations

import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

_PIECE = 1 << 20


def medians(calls: Mapping[str, Callable[[], object]], repeats: int, before: Callable[[], None]) -> dict[str, float]:
    """Return each call's median seconds after one turn of warm-up.

    The calls take turns, so that all of them meet the same load. `before` is called before each, and is not measured.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(1 + repeats):
        for name, call in calls.items():
            before()
            begin = time.perf_counter()
            call()
            if turn:
                taken[name].append(time.perf_counter() - begin)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


class PlainFile:
    """A file of `nbytes` bytes, to be read as a whole into memory that is there already. Made at once."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path = path
        self._target = bytearray(nbytes)
        with path.open("wb", buffering=0) as stream:
            piece = os.urandom(_PIECE)
            for at in range(0, nbytes, _PIECE):
                stream.write(piece[: nbytes - at])
            os.fdatasync(stream.fileno())

    def read(self) -> None:
        """Read it."""
        view = memoryview(self._target)
        at = 0
        with self._path.open("rb", buffering=0) as stream:
            while count := stream.readinto(view[at : at + _PIECE]):
                at += count


def can_forget() -> bool:
    """Whether `forget` does anything here."""
    return hasattr(os, "posix_fadvise")


def forget(path: Path) -> None:
    """Ask the system to drop a file from its page cache. What is mapped, or not written yet, stays there."""
    with path.open("rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class PlainSocket:
    """Sends `nbytes` bytes over TCP on loopback each time it is asked, from a thread that does nothing else."""

    def __init__(self, nbytes: int) -> None:
        self._target = bytearray(nbytes)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._client = socket.create_connection(listener.getsockname())
            self._server, _ = listener.accept()
        self._thread = threading.Thread(target=self._serve, args=(nbytes,), daemon=True)
        self._thread.start()

    def read(self) -> None:
        """Ask for the bytes, and receive them."""
        self._client.sendall(b"?")
        view = memoryview(self._target)
        at = 0
        while at < len(view):
            at += self._client.recv_into(view[at : at + _PIECE])

    def close(self) -> None:
        """End the thread."""
        self._client.close()
        self._thread.join(5.0)
        self._server.close()

    def _serve(self, nbytes: int) -> None:
        data = bytes(nbytes)
        while self._server.recv(1):
            self._server.sendall(data)
