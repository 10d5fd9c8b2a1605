"""How a page is written outside host memory: a versioned header, and raw parts that can be read without copying.

``TRPG``, version (u16), length of the JSON (u32), xxh3 of JSON and token ids (u64), all big-endian; then the JSON, then the
token ids. Each part is the page's tensors one after another, token-major, each at a multiple of 64 bytes; its checksum is
in the header. Nothing is unpickled, and a header that is not understood is no page.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from tailreplay.errors import TailReplayError
from tailreplay.keys import TOKEN_BYTES
from tailreplay.provenance import Provenance, Start

MAGIC = b"TRPG"
VERSION = 1
ALIGNMENT = 64
WHOLE = "0/1"
"""Rank of a page that is not shared out among ranks."""
_FIXED = struct.Struct(">4sHIQ")


class PageFormatError(TailReplayError):
    """The bytes are no page of a version that this release reads."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a part.

    Attributes
    ----------
    name : str
        As in `tailreplay.pages.PartSpec`.
    shape : tuple of int
        Of one token.
    dtype : str
        Of the decoded numbers: "bfloat16".
    codec : str
        How they are encoded (see `tailreplay.codecs`).
    token_bytes : int
        Of one encoded token.
    rows : int
        Encoded tokens: those of the page, or more where only whole pages have a meaning.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    codec: str
    token_bytes: int
    rows: int


@dataclass(frozen=True, slots=True)
class PartEntry:
    """One part of a page: its tensors in order, its bytes and their xxh3 checksum."""

    tensors: tuple[TensorEntry, ...]
    nbytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class PageHeader:
    """All that is known of a stored page.

    Attributes
    ----------
    key, parent : bytes
        32-byte names in the key chain. The parent of a sequence's first page is the namespace's digest.
    namespace : bytes
        Digest of model, layout, page size, salt, adapter and images.
    tenant : bytes
        8 bytes that stand for the salt.
    start : int
        Position of the first token in the sequence.
    ids : bytes
        Encoded token ids (see `tailreplay.keys.token_bytes`).
    rank : str
        Whose share it is: `WHOLE` for all of it.
    label : str
        Model name for people.
    created : float
        Seconds since the epoch.
    gates : str
        What its tokens forget, from `encode_gates`; "" where nobody knows.
    """

    key: bytes
    parent: bytes
    namespace: bytes
    tenant: bytes
    start: int
    ids: bytes
    provenance: Provenance
    parts: dict[str, PartEntry]
    rank: str = WHOLE
    label: str = ""
    created: float = 0.0
    gates: str = ""

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.ids) // TOKEN_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts.values())


def pack_header(header: PageHeader) -> bytes:
    """Return the header's bytes."""
    text: dict[str, Any] = {
        "key": header.key.hex(),
        "parent": header.parent.hex(),
        "namespace": header.namespace.hex(),
        "tenant": header.tenant.hex(),
        "start": header.start,
        "provenance": _provenance(header.provenance),
        "rank": header.rank,
        "label": header.label,
        "created": round(header.created, 3),
        "parts": {
            name: {
                "nbytes": part.nbytes,
                "xxh3": part.checksum,
                "tensors": [[t.name, t.shape, t.dtype, t.codec, t.token_bytes, t.rows] for t in part.tensors],
            }
            for name, part in header.parts.items()
        },
    }
    if header.gates:
        text["gates"] = header.gates
    body = json.dumps(text, separators=(",", ":")).encode()
    checked = body + header.ids
    return _FIXED.pack(MAGIC, VERSION, len(body), xxh3_64_intdigest(checked)) + checked


def unpack_header(data: bytes | memoryview) -> PageHeader:
    """Read a header.

    Raises
    ------
    PageFormatError
        If it is damaged, of another version, or no header at all; one sentence.
    """
    data = bytes(data)
    if len(data) < _FIXED.size or data[:4] != MAGIC:
        raise PageFormatError("These bytes are no page header.")
    _, version, length, checksum = _FIXED.unpack_from(data)
    if version != VERSION:
        raise PageFormatError(f"The page has format version {version}; this release reads version {VERSION}.")
    checked = data[_FIXED.size :]
    if len(checked) < length or xxh3_64_intdigest(checked) != checksum:
        raise PageFormatError("The page header is damaged: its checksum is wrong.")
    try:
        return _header(json.loads(checked[:length]), checked[length:])
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise PageFormatError(f"The page header lacks something: {error!r}.") from error


def _header(text: dict[str, Any], ids: bytes) -> PageHeader:
    depth, lossy, *start = text["provenance"]
    parts = {
        str(part_name): PartEntry(
            tuple(_tensor(name, tuple(shape), *rest) for name, shape, *rest in part["tensors"]),
            int(part["nbytes"]),
            int(part["xxh3"]),
        )
        for part_name, part in text["parts"].items()
    }
    return PageHeader(
        key=bytes.fromhex(text["key"]),
        parent=bytes.fromhex(text["parent"]),
        namespace=bytes.fromhex(text["namespace"]),
        tenant=bytes.fromhex(text["tenant"]),
        start=int(text["start"]),
        ids=ids,
        provenance=Provenance(int(depth), bool(lossy), Start(*start) if start else _start_of(int(depth))),
        parts=parts,
        rank=str(text["rank"]),
        label=str(text["label"]),
        created=float(text["created"]),
        gates=str(text.get("gates", "")),
    )


def _provenance(provenance: Provenance) -> list[int | bool]:
    """What older releases read, where that says it all: they began from nothing but zero states."""
    depth, lossy, start = provenance
    return [depth, lossy] if start == _start_of(depth) else [depth, lossy, int(start)]


def _start_of(depth: int) -> Start:
    return Start.ZERO if depth else Start.COMPLETE


@lru_cache(4096, typed=True)
def _tensor(name: str, shape: tuple[int, ...], dtype: str, codec: str, token_bytes: int, rows: int) -> TensorEntry:
    """Pages of one model differ in nothing here, and making these anew takes longer than reading the JSON."""
    return TensorEntry(str(name), tuple(map(int, shape)), str(dtype), str(codec), int(token_bytes), int(rows))


def encode_gates(gates: NDArray[Any] | None) -> str:
    """Return `tailreplay.page.Page.gates` as text: "2x8x16:" and its float16 numbers in base64."""
    if gates is None:
        return ""
    numbers = base64.b64encode(np.ascontiguousarray(gates, dtype="<f2").tobytes()).decode()
    return f"{'x'.join(map(str, gates.shape))}:{numbers}"


def decode_gates(text: str) -> NDArray[Any] | None:
    """Undo `encode_gates`; None for text that it never wrote: a page without gates is as good as any."""
    shape, _, numbers = text.partition(":")
    try:
        sizes = tuple(map(int, shape.split("x")))
        found = np.frombuffer(base64.b64decode(numbers, validate=True), dtype="<f2").reshape(sizes)
    except ValueError:
        return None
    return found if found.ndim == 3 and found.shape[0] == 2 and bool(np.isfinite(found).all()) else None


def offsets(tensors: Sequence[TensorEntry]) -> tuple[list[int], int]:
    """Return where each tensor of a part begins, and the part's size in bytes."""
    at, begins = 0, []
    for tensor in tensors:
        begins.append(at)
        at += -(-tensor.rows * tensor.token_bytes // ALIGNMENT) * ALIGNMENT
    return begins, at


def is_intact(part: PartEntry, data: bytes | memoryview) -> bool:
    """Whether `data` is, byte by byte, the part that the header speaks of."""
    return memoryview(data).nbytes == part.nbytes and xxh3_64_intdigest(data) == part.checksum
