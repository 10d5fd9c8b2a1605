"""What a tier below host memory is: a store of pages by key, on disk or on another machine.

A tier moves bytes and knows nothing of tensors, models or plans. It may be slow, lose pages and fail: whoever asks
checks what comes back (see `tailreplay.page_format`) and goes on without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tailreplay.errors import TailReplayError

KV, HIDDEN = "kv", "hidden"
PARTS = (KV, HIDDEN)
"""Parts of a page that are fetched and evicted by themselves."""

Buffer = bytes | bytearray | memoryview


class TierError(TailReplayError):
    """A tier could not do what it was asked: it is down, full, or its data is unreadable."""


class TierFullError(TierError):
    """The tier is well but will not take these pages: it is full, or one is too large for it."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a tier has of one page.

    Attributes
    ----------
    header : bytes
        As it was put; not checked yet.
    parts : frozenset of str
        Those of `PARTS` that are there.
    """

    header: bytes
    parts: frozenset[str]


@dataclass(frozen=True, slots=True)
class TierPage:
    """A page to be put.

    Attributes
    ----------
    key : bytes
        32-byte name in the key chain, of one rank's share of the page.
    header : bytes
        See `tailreplay.page_format`.
    parts : mapping
        Part name -> one buffer, or several whose concatenation is the part.
    hints : tuple of bytes
        32-byte names of the first tokens of the page: a prompt that parts from it midway finds it by one of them.
    tenant : bytes
        8 bytes that stand for the salt it was stored under; byte limits by tenant go by them.
    """

    key: bytes
    header: bytes
    parts: Mapping[str, Sequence[Buffer]]
    hints: tuple[bytes, ...] = ()
    tenant: bytes = bytes(8)

    @property
    def nbytes(self) -> int:
        """Bytes of the header and all parts."""
        return len(self.header) + sum(memoryview(b).nbytes for part in self.parts.values() for b in part)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a tier holds. None where the medium cannot tell."""

    bytes_used: int | None
    bytes_limit: int | None
    pages: int | None
    evictions: int = 0
    by_tenant: Mapping[bytes, int] = field(default_factory=dict)


class Tier(Protocol):
    """A store of pages. Every method may block, may be called from any thread, and raises only `TierError`.

    Attributes
    ----------
    name : str
        For logs and metrics: "disk", "redis", "mooncake".
    """

    name: str

    def contains(self, keys: Sequence[bytes]) -> list[Found | None]:
        """Say for each key what is there, in one round trip. Marks nothing as used."""
        ...

    def resolve(self, hints: Sequence[bytes]) -> list[bytes | None]:
        """Return for each hint the key of a page that was put with it, in one round trip; the page may be gone."""
        ...

    def get(self, keys: Sequence[bytes], part: str) -> Iterator[memoryview | None]:
        """Yield `part` of each page, in the order of `keys`; None if it is not there. Marks the pages as used.

        A view holds until the next one is asked for.
        """
        ...

    def put(self, pages: Sequence[TierPage]) -> None:
        """Store pages, evicting others if need be; a page that is there already gets the parts that it lacks.

        When it returns, the pages outlast the end of this process. Where it raises, each page is there as a whole or not
        at all; none is half there.
        """
        ...

    def replace(self, pages: Sequence[TierPage]) -> None:
        """Store pages over whatever is there under their keys: better bytes of the same tokens."""
        ...

    def drop(self, keys: Sequence[bytes], part: str | None = None) -> None:
        """Remove pages, or only one part of them; what is not there is no error."""
        ...

    def usage(self) -> Usage:
        """Return what it holds now."""
        ...

    def close(self) -> None:
        """Let go of files and connections; a second call does nothing."""
        ...
