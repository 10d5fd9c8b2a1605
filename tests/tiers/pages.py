"""Pages with real headers and made-up bytes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache

from xxhash import xxh3_64_intdigest

from tailreplay.page_format import PageHeader, PartEntry, TensorEntry, pack_header
from tailreplay.provenance import EXACT, Provenance
from tailreplay.tiers.base import TierPage

NAMESPACE = b"n" * 32
TENANTS = [bytes(8), b"tenant-1", b"tenant-2"]


def key_of(index: int) -> bytes:
    return b"page" + index.to_bytes(28, "big")


def hint_of(index: int) -> bytes:
    return b"hint" + index.to_bytes(28, "big")


@lru_cache(maxsize=512)
def data_of(index: int, version: int, part: str, nbytes: int) -> bytes:
    """Bytes that no other page, version or part has."""
    return random.Random(f"{index} {version} {part} {nbytes}").randbytes(nbytes)


def make_page(
    index: int,
    sizes: dict[str, int],
    version: int = 0,
    tenant: bytes = TENANTS[0],
    hints: Sequence[int] = (),
    provenance: Provenance = EXACT,
    parent: int | None = None,
    namespace: bytes = NAMESPACE,
    created: float = 0.0,
    label: str = "tiny",
) -> TierPage:
    """Make page `index` of a chain; `sizes` says how many bytes each part has."""
    data = {part: data_of(index, version, part, nbytes) for part, nbytes in sizes.items()}
    entries = {
        part: PartEntry((TensorEntry(part, (1,), "uint8", "raw", 1),), len(value), xxh3_64_intdigest(value))
        for part, value in data.items()
    }
    header = PageHeader(
        key=key_of(index),
        parent=namespace if parent is None else key_of(parent),
        namespace=namespace,
        tenant=tenant,
        start=index * 16,
        ids=index.to_bytes(4, "little") * 16,
        provenance=provenance,
        parts=entries,
        created=created,
        label=label,
    )
    # Two buffers a part, as the engines hand them over.
    parts = {part: [value[: len(value) // 2], memoryview(value)[len(value) // 2 :]] for part, value in data.items()}
    return TierPage(key_of(index), pack_header(header), parts, tuple(map(hint_of, hints)), tenant)


def value_of(page: TierPage, part: str) -> bytes:
    """Return a part in one piece."""
    return b"".join(bytes(buffer) for buffer in page.parts[part])
