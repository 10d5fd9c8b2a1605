"""Pages that tests put into tiers: their headers are real, so damage is found as it is in use."""

from __future__ import annotations

import random
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from tailreplay.page_format import PageHeader, PartEntry, TensorEntry, pack_header
from tailreplay.provenance import EXACT, Provenance
from tailreplay.tiers.base import PARTS, TierPage

TOKENS = 16


def page(
    number: int, parts: Sequence[str] = PARTS, nbytes: int = 4096, seed: int = 0, provenance: Provenance = EXACT
) -> TierPage:
    """Return page `number`; another `seed` gives other bytes of the same tokens."""
    values = {part: random.Random(f"{number} {part} {seed}").randbytes(nbytes) for part in parts}
    entry = TensorEntry("x", (nbytes // TOKENS,), "uint8", "plain", nbytes // TOKENS, TOKENS)
    header = PageHeader(
        key=name(number),
        parent=name(number - 1),
        namespace=bytes(32),
        tenant=bytes(8),
        start=TOKENS * number,
        ids=bytes(4 * TOKENS),
        provenance=provenance,
        parts={part: PartEntry((entry,), nbytes, xxh3_64_intdigest(value)) for part, value in values.items()},
    )
    hints = (hint(number),)
    return TierPage(name(number), pack_header(header), {part: [value] for part, value in values.items()}, hints)


def name(number: int) -> bytes:
    """Return the key of page `number`."""
    return (number + 1).to_bytes(32, "big")


def hint(number: int) -> bytes:
    """Return the hint of page `number`."""
    return b"\xff" + (number + 1).to_bytes(31, "big")


def content(of: TierPage, part: str) -> bytes:
    """Return a part's bytes."""
    return b"".join(of.parts[part])
