"""Whether looking a prompt up in a disk tier takes longer when it holds a hundred times as many pages."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tailreplay.bench.page_shapes import PAGE_SHAPES
from tailreplay.bench.plain import medians
from tailreplay.bench.storage_bytes import first_record
from tailreplay.errors import TailReplayError
from tailreplay.keys import Namespace, page_key, token_bytes
from tailreplay.provenance import EXACT
from tailreplay.tiers.base import TierPage
from tailreplay.tiers.disk import DiskTier
from tailreplay.tiers.finder import Finder
from tailreplay.tiers.host import HostArena
from tailreplay.tiers.naming import PageRecord
from tailreplay.tiers.packing import Packer

_LIMIT = 4 << 30
_BATCH = 1000
PAGE_SIZE = 64


def find_rows(tokens: int, counts: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Return how long `Finder.find` takes for a prompt all of whose pages are there, among so many pages in all.

    The pages have the parts of the shape "tiny", so that their number matters and not their bytes.
    """
    layout = PAGE_SHAPES["tiny"].layout(PAGE_SIZE)
    namespace = Namespace("bench", layout.digest, PAGE_SIZE)
    ids = token_bytes([*range(1, tokens + 1)])
    arena = HostArena(layout, 1)
    for part in layout.parts:
        arena.write(part, [0], torch.zeros(PAGE_SIZE, *part.shape, dtype=part.dtype))
    packer = Packer(arena)
    own = list(_chain(namespace, ids))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for count in counts:
            tier = DiskTier(Path(folder) / str(count), _LIMIT)
            _fill(tier, packer, own)
            _fill(tier, packer, _others(namespace, count - len(own)))
            finder = Finder([tier], PAGE_SIZE)

            def find(finder: Finder = finder) -> None:
                if len(finder.find(ids, namespace, 0, namespace.digest)) != len(own):
                    raise TailReplayError("The disk tier has lost pages.")

            seconds = medians({"find": find}, 10 * repeats, lambda: None)["find"]
            rows.append({"pages": tier.usage().pages, "tokens": tokens, "ms": 1000 * seconds})
            tier.close()
    for row in rows:
        row["ratio"] = row["ms"] / rows[0]["ms"]
    return rows


def _fill(tier: DiskTier, packer: Packer, records: Sequence[PageRecord] | Iterator[PageRecord]) -> None:
    batch: list[TierPage] = []
    for record in records:
        page = packer.pack(record, 0, 0)
        # The parts are of no interest here, and would take most of the time to write.
        batch.append(TierPage(page.key, page.header, {part: [b"."] for part in page.parts}, page.hints))
        if len(batch) == _BATCH:
            tier.put(batch)
            batch = []
    tier.put(batch)


def _chain(namespace: Namespace, ids: bytes) -> Iterator[PageRecord]:
    parent, step = namespace.digest, 4 * PAGE_SIZE
    for at in range(0, len(ids) - step + 1, step):
        part = ids[at : at + step]
        key = page_key(parent, namespace.digest, part)
        yield PageRecord(key, parent, namespace.digest, namespace.tenant, at // 4, part, EXACT)
        parent = key


def _others(namespace: Namespace, count: int) -> Iterator[PageRecord]:
    """Name first pages of other prompts."""
    for number in range(count):
        yield first_record(namespace, token_bytes([1 << 20, number, *range(PAGE_SIZE - 2)]))
