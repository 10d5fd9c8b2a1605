"""What is worth computing again exactly: sequences that were computed after an approximate hit. No tensors."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from tailreplay.keys import TOKEN_BYTES, Namespace, TokenIds, token_bytes


@dataclass(frozen=True, slots=True)
class Repair:
    """A sequence to be computed exactly.

    Attributes
    ----------
    namespace : Namespace
        Of its pages.
    ids : bytes
        Encoded token ids (see `tailreplay.keys.token_bytes`).
    branch : int
        Token at which the approximate hit ended: where others are likely to leave, too.
    """

    namespace: Namespace
    ids: bytes
    branch: int


class Repairs:
    """Sequences that wait for repair, the one noted last first. Bounded; thread-safe.

    Parameters
    ----------
    most : int
        Sequences to remember; older ones are forgotten.
    most_tokens : int
        Tokens of all of them together.
    """

    def __init__(self, most: int = 64, most_tokens: int = 1 << 20) -> None:
        self._most = most
        self._most_bytes = most_tokens * TOKEN_BYTES
        self._waiting: OrderedDict[tuple[bytes, bytes], Repair] = OrderedDict()
        self._bytes = 0
        # Taken last: what is approximate still could not be stored, and would be taken again and again.
        self._done: OrderedDict[tuple[bytes, bytes], None] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Sequences that wait."""
        return len(self._waiting)

    def note(self, namespace: Namespace, tokens: TokenIds, branch: int) -> None:
        """Remember a sequence that was computed after an approximate hit of `branch` tokens, unless it was taken lately."""
        ids = token_bytes(tokens)
        with self._lock:
            if (namespace.digest, ids) in self._done:
                return  # it did not help, or it would be exact
            for key in [key for key in self._waiting if key[0] == namespace.digest and ids.startswith(key[1])]:
                # An earlier turn of the same conversation: repaired with it.
                branch = min(branch, self._waiting[key].branch)
                self._forget(key)
            self._add(Repair(namespace, ids, branch))

    def take(self) -> Repair | None:
        """Return the sequence noted last, which is forgotten here; None if there is none."""
        with self._lock:
            if not self._waiting:
                return None
            key, repair = next(reversed(self._waiting.items()))
            self._forget(key)
            self._done[key] = None
            while len(self._done) > self._most:
                self._done.popitem(last=False)
            return repair

    def put_back(self, repair: Repair) -> None:
        """Let a sequence wait again that was taken and not repaired."""
        with self._lock:
            self._done.pop((repair.namespace.digest, repair.ids), None)
            self._add(repair)

    def _add(self, repair: Repair) -> None:
        self._waiting[repair.namespace.digest, repair.ids] = repair
        self._bytes += len(repair.ids)
        while len(self._waiting) > 1 and (len(self._waiting) > self._most or self._bytes > self._most_bytes):
            self._forget(next(iter(self._waiting)))

    def _forget(self, key: tuple[bytes, bytes]) -> None:
        del self._waiting[key]
        self._bytes -= len(key[1])
