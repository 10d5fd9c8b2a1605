"""How many bytes a token takes, by shape and codec: what is really stored, headers and padding included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tailreplay.bench.page_shapes import PAGE_SHAPES
from tailreplay.codecs import CODECS
from tailreplay.keys import Namespace, page_key, token_bytes
from tailreplay.pages import PageLayout
from tailreplay.provenance import EXACT
from tailreplay.tiers.host import HostArena
from tailreplay.tiers.naming import PageRecord
from tailreplay.tiers.packing import Packer

SHARE = 0.25
TARGETS = {"qwen3.5-4b": 1.6, "qwen3.6-27b": 2.2}
"""KV and int8 hiddens, in bfloat16 keys and values alone."""


def byte_rows(shapes: Sequence[str], page_size: int = 64) -> list[dict[str, Any]]:
    """Return one row for each shape and pair of codecs.

    ``kv`` and ``hidden`` are bytes a token; ``ratio`` is both over the bfloat16 keys and values alone, ``shared`` the same
    where host memory keeps the hiddens of a quarter of the pages. ``header`` and ``padding`` are bytes a page in a tier,
    and ``stored`` is the ratio with them.
    """
    return [_row(name, hidden, kv, page_size) for name in shapes for kv in CODECS for hidden in CODECS]


def _row(name: str, hidden: str, kv: str, page_size: int) -> dict[str, Any]:
    plain = PAGE_SHAPES[name].layout(page_size)
    held = plain.with_codecs(hidden, kv)
    alone = plain.kv_bytes_per_token
    hiddens = sum(held.hidden_bytes_per_token)
    header, parts = _packed(plain, hidden, kv)
    ratio = (held.kv_bytes_per_token + hiddens) / alone
    target = TARGETS.get(name) if (hidden, kv) == ("int8", "none") else None
    return {
        "shape": name,
        "kv_codec": kv,
        "hidden_codec": hidden,
        "kv_alone": alone,
        "kv": held.kv_bytes_per_token,
        "hidden": hiddens,
        "ratio": ratio,
        "shared": (held.kv_bytes_per_token + SHARE * hiddens) / alone,
        "header": header,
        "padding": parts - held.page_bytes,
        "stored": (header + parts) / page_size / alone,
        "target": target,
        "met": None if target is None else ratio <= target,
    }


def _packed(layout: PageLayout, hidden: str, kv: str) -> tuple[int, int]:
    """Return the bytes of the header and of the parts of one page, as it is written to a tier."""
    arena = HostArena(layout, 1)
    for part in layout.parts:
        arena.write(part, [0], torch.zeros(layout.page_size, *part.shape, dtype=part.dtype))
    namespace = Namespace("bench", layout.digest, layout.page_size)
    # Ids of a vocabulary of a quarter million: they take four bytes whatever they are.
    record = first_record(namespace, token_bytes([248_000] * layout.page_size))
    page = Packer(arena, hidden, kv).pack(record, 0, 0)
    return len(page.header), page.nbytes - len(page.header)


def first_record(namespace: Namespace, ids: bytes) -> PageRecord:
    """Name the page that holds `ids` at the beginning of a sequence."""
    digest = namespace.digest
    return PageRecord(page_key(digest, digest, ids), digest, digest, namespace.tenant, 0, ids, EXACT)
