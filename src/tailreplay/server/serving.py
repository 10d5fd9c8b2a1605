"""Runs the application: socket, ready line, and an end that does not wait for long answers."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from tailreplay.errors import TailReplayError
from tailreplay.server.worker import Worker

_SECONDS_TO_CLOSE = 5


def bind(host: str, port: int) -> socket.socket:
    """Reserve an address before anything slow is done; nobody can connect yet.

    Raises
    ------
    TailReplayError
        If the address cannot be had.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise _cannot_listen(host, port, error) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the address as people type it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    app: FastAPI,
    worker: Worker,
    listener: socket.socket,
    on_ready: Callable[[], None],
    on_end: Callable[[], None] = lambda: None,
) -> None:
    """Serve until a signal comes; running requests are then cancelled.

    Parameters
    ----------
    worker : Worker
        Started here and ended here.
    listener : socket.socket
        From `bind`.
    on_ready : callable
        Called once, when connections are accepted.
    on_end : callable
        Called when no request runs any more. A signal ends the process before this function returns.

    Raises
    ------
    TailReplayError
        If another process took the address meanwhile.
    """
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=_SECONDS_TO_CLOSE
    )
    worker.start()
    try:
        _Server(config, worker, on_ready, on_end).run(sockets=[listener])
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise _cannot_listen(host, port, error) from None
    finally:
        worker.close()
        worker.join()


class _Server(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, worker: Worker, on_ready: Callable[[], None], on_end: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._worker = worker
        self._on_ready = on_ready
        self._on_end = on_end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # First, or the server would wait for the answers that are running.
        self._worker.close()
        await super().shutdown(sockets)
        self._worker.join()
        self._on_end()


def _cannot_listen(host: str, port: int, error: OSError) -> TailReplayError:
    if error.errno == errno.EADDRINUSE:
        return TailReplayError(f"Port {port} of {host} is in use: choose another with --port.")
    return TailReplayError(f"Cannot listen at {host}, port {port}: {error.strerror or error}.")
