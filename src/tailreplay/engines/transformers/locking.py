"""One lock a model: wrappers of the same model take turns."""

from __future__ import annotations

import threading
from types import TracebackType
from weakref import WeakKeyDictionary

import torch


class ModelLock:
    """Held while a model runs. Entering it twice from one thread is an error instead of a deadlock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    def __enter__(self) -> None:
        if self._owner == threading.get_ident():
            raise RuntimeError("This model is in the middle of a stream: iterate it to its end or close it first.")
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owner = None
        self._lock.release()


_locks: WeakKeyDictionary[torch.nn.Module, ModelLock] = WeakKeyDictionary()
_guard = threading.Lock()


def lock_of(model: torch.nn.Module) -> ModelLock:
    """Return the lock of `model`, the same for every wrapper of it."""
    with _guard:
        return _locks.setdefault(model, ModelLock())
