"""One open database a folder and process: LMDB's locks do not tell two of one process apart."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from tailreplay.errors import CacheConfigError
from tailreplay.sizes import format_bytes
from tailreplay.tiers.base import TierError
from tailreplay.tiers.disk.env import DiskEnv
from tailreplay.tiers.disk.file import folder_at

_shared: dict[Path, DiskEnv] = {}
_shared_lock = threading.Lock()
_fork_lock = threading.Lock()


def open_env(path: Path, limit: int | None) -> DiskEnv:
    """Open the database in folder `path`, or share the one that this process has open there.

    Raises
    ------
    CacheConfigError
        As `DiskEnv`, or if this process has it open with another limit.
    """
    path = folder_at(path).resolve()
    with _shared_lock:
        env = _shared.get(path)
        if env is None:
            env = _shared[path] = DiskEnv(path, limit)
        elif limit not in (None, env.limit):
            raise CacheConfigError(
                f"This process has the cache in '{path}' open with {format_bytes(env.limit)} already."
            )
        else:
            env.share()
        return env


def close_env(env: DiskEnv) -> None:
    """Give back what `open_env` gave."""
    with _shared_lock:
        if env.release():
            _shared.pop(env.path, None)


def reopen_env(env: DiskEnv) -> DiskEnv:
    """Open anew, in a child process, what was open before the fork.

    Raises
    ------
    TierError
        As `DiskEnv.abandon`, or if it cannot be opened.
    """
    with _shared_lock:
        shared = _shared.get(env.path, env)
        if shared.pid == os.getpid():
            shared.share()
            return shared
        shared.abandon()
        try:
            _shared[env.path] = DiskEnv(env.path, None)
        except CacheConfigError as error:
            raise TierError(str(error)) from error
        return _shared[env.path]


def fork_lock() -> threading.Lock:
    """Return the lock under which a tier opens its file anew in a child process: one that no lost thread holds."""
    return _fork_lock


def _after_fork() -> None:
    global _shared_lock, _fork_lock
    _shared_lock, _fork_lock = threading.Lock(), threading.Lock()
    for env in _shared.values():
        env._lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
