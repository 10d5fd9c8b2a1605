"""Which pages were read since it was last written down: a write every thousand reads or so, not one each."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tailreplay.tiers.disk.writer import Writer

BATCH = 1024


class Touches:
    """Keys of used pages, most recently used last."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start anew, in a child process too, where a thread that is not there may hold the lock."""
        self._lock = threading.Lock()
        self._keys: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: Sequence[bytes]) -> None:
        """Note pages that were read in one go, the start of a chain first."""
        with self._lock:
            # The start of a chain outlives its end.
            for key in reversed(keys):
                self._keys.pop(key, None)
                self._keys[key] = None

    def write(self, writer: Writer) -> None:
        """Mark them as used in `writer`'s transaction, and forget them; if it fails they are lost, which does no harm."""
        with self._lock:
            keys, self._keys = self._keys, {}
        # Here the one used last comes first.
        writer.touch(list(reversed(keys)))
