"""A tier that fails on demand, in every way that a medium or a network can."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from tailreplay.tiers.base import TierError
from tests.tiers.memory_tier import MemoryTier

FAULTS = ("error", "crash", "hang", "cut", "flip", "swap", "full", "gone", "reads", "writes")


class FaultyTier(MemoryTier):
    """A `MemoryTier` with a fault, or none.

    Attributes
    ----------
    fault : str
        "" or one of `FAULTS`: "error" and "crash" fail every call, with an error that was foreseen or not; "hang" never
        answers (until mended); "cut", "flip" and "swap" change what is read; "full" fails every write; "gone" fails and has
        forgotten everything; "reads" and "writes" fail one kind of call only.
    """

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes, self._obey)
        self.fault = ""
        self._mended = threading.Event()

    def break_down(self, fault: str) -> None:
        """Begin to fail. Mutates self."""
        self._mended.clear()
        self.fault = fault
        if fault == "gone":
            self.pages.clear()
            self.hints.clear()

    def mend(self) -> None:
        """Work again; what hangs goes on."""
        self.fault = ""
        self._mended.set()

    def get(self, keys: Sequence[bytes], part: str) -> Iterator[memoryview | None]:
        held = bytearray()
        for view in super().get(keys, part):
            if view is None or self.fault not in ("cut", "flip", "swap"):
                yield view
                continue
            data = bytearray(view)
            if self.fault == "cut":
                del data[-1]
            elif self.fault == "flip":
                data[len(data) // 2] ^= 1 << len(data) % 8
            else:
                data, held = held or data[::-1], data
            yield memoryview(data)

    def close(self) -> None:
        """Stay open for the next cache."""

    def _obey(self, method: str) -> None:
        fault = self.fault
        if fault == "hang":
            self._mended.wait()
        elif fault == "crash":
            raise RuntimeError("a bug in a library")
        elif fault in ("error", "gone"):
            raise TierError("Nobody answers.")
        elif (fault in ("full", "writes") and method in ("put", "drop")) or (fault == "reads" and method != "put"):
            raise TierError("No.")
