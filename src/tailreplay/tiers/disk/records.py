"""What a disk tier's database holds: its tables, and the records that are not bytes of pages."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Any

FORMAT = b"tailreplay pages 1"
"""Value of `FORMAT_KEY` in `Tables.total`; a database without it is not ours."""

FORMAT_KEY, LIMIT_KEY, ALL_KEY = b"format", b"limit", b"all"
TENANT = b"t"
"""First byte of a tenant's key in `Tables.total`."""

PAGE_ORDER, HIDDEN_ORDER = b"p", b"h"
"""First byte of a key in `Tables.order`: of all pages, and of those that have a hidden part."""

KEY_BYTES = 32
ABSENT = -1
_RECORD = struct.Struct(">Q8sIqq")
_TOTAL = struct.Struct(">qqqQ")
_TICK = struct.Struct(">Q")


@dataclass(frozen=True, slots=True)
class Tables:
    """Handles of the database's tables.

    Attributes
    ----------
    header, kv, hidden
        Page key -> bytes as they were put.
    page
        Page key -> `Record`.
    order
        Kind, tenant, tick -> page key: least recently used first.
    hint
        Hint -> page key.
    total
        Byte totals, the limit and the format.
    """

    header: Any
    kv: Any
    hidden: Any
    page: Any
    order: Any
    hint: Any
    total: Any

    def part(self, name: str) -> Any:
        """Return the table of a part."""
        return {"kv": self.kv, "hidden": self.hidden}[name]


NAMES = tuple(Tables.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class Record:
    """Sizes and last use of one page.

    Attributes
    ----------
    tick : int
        Nanoseconds since the epoch at the last use, and later than every tick before.
    tenant : bytes
        8 bytes.
    header, kv, hidden : int
        Bytes; `ABSENT` for a part that is not there.
    hints : tuple of bytes
    """

    tick: int
    tenant: bytes
    header: int = 0
    kv: int = ABSENT
    hidden: int = ABSENT
    hints: tuple[bytes, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the header and the parts that are there."""
        return self.header + max(self.kv, 0) + max(self.hidden, 0)

    @property
    def parts(self) -> frozenset[str]:
        """Names of the parts that are there."""
        return frozenset(name for name, size in (("kv", self.kv), ("hidden", self.hidden)) if size != ABSENT)

    def with_part(self, part: str, nbytes: int) -> Record:
        """Return the record with another size of `part`."""
        return replace(self, kv=nbytes) if part == "kv" else replace(self, hidden=nbytes)

    def order_keys(self) -> list[bytes]:
        """Return the keys under which the page stands in `Tables.order`."""
        kinds = [PAGE_ORDER] if self.hidden == ABSENT else [PAGE_ORDER, HIDDEN_ORDER]
        return [kind + self.tenant + _TICK.pack(self.tick) for kind in kinds]

    def pack(self) -> bytes:
        """Return the record's bytes."""
        fixed = _RECORD.pack(self.tick, self.tenant, self.header, self.kv, self.hidden)
        return fixed + b"".join(self.hints)

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Record:
        """Read a record."""
        tick, tenant, header, kv, hidden = _RECORD.unpack_from(data)
        hints = bytes(data[_RECORD.size :])
        each = tuple(hints[at : at + KEY_BYTES] for at in range(0, len(hints), KEY_BYTES))
        return cls(tick, tenant, header, kv, hidden, each)


@dataclass(slots=True)
class Total:
    """Bytes and pages of a tenant or of all, evictions ever, and the last tick that was given out."""

    nbytes: int = 0
    pages: int = 0
    evictions: int = 0
    tick: int = 0

    def pack(self) -> bytes:
        """Return the total's bytes."""
        return _TOTAL.pack(self.nbytes, self.pages, self.evictions, self.tick)

    @classmethod
    def unpack(cls, data: bytes | memoryview | None) -> Total:
        """Read a total; nothing is all zeros."""
        return cls() if data is None else cls(*_TOTAL.unpack(data))


def tick_of(order_key: bytes | memoryview) -> int:
    """Return the tick in a key of `Tables.order`."""
    tick: int = _TICK.unpack_from(order_key, 9)[0]
    return tick
