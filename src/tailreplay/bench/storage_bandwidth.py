"""How fast the pages of a prefix come from each place, beside what the machine does without a cache."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch

from tailreplay.bench.page_shapes import PAGE_SHAPES
from tailreplay.bench.plain import PlainFile, PlainSocket, can_forget, forget, medians
from tailreplay.bench.storage_hits import PAGE_SIZE, Hits, opened, place_of
from tailreplay.modes import parse_reuse
from tailreplay.tiers.factory import folder_of


def bandwidth_rows(shape: str, tokens: int, addresses: Sequence[str], repeats: int) -> list[dict[str, Any]]:
    """Return how fast all parts of a prefix are read, one row a place and way, beside a plain transfer of as many bytes."""
    rows = _host_bandwidth(shape, tokens, repeats)
    for address in addresses:
        rows += _tier_bandwidth(shape, tokens, address, repeats)
    return rows


def _host_bandwidth(shape: str, tokens: int, repeats: int) -> list[dict[str, Any]]:
    with (
        opened(shape, tokens, "") as hits,
        closing(Hits(PAGE_SHAPES[shape], tokens, scattered=True)) as scattered,
    ):
        plan, other = (each.look_up(parse_reuse("exact")) for each in (hits, scattered))
        nbytes = hits.nbytes(plan)
        # Not zeros: those would all be read from one page of memory.
        block, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
        calls: dict[str, Callable[[], object]] = {
            "read": lambda: hits.read(plan),
            "read, scattered": lambda: scattered.read(other),
            "memcpy": lambda: target.copy_(block),
        }
        return _rates("host", calls, nbytes, repeats)


def _tier_bandwidth(shape: str, tokens: int, address: str, repeats: int) -> list[dict[str, Any]]:
    place, folder = place_of(address), folder_of(address)
    reuse = parse_reuse("exact")
    with ExitStack() as stack:
        hits = stack.enter_context(opened(shape, tokens, address))
        target = torch.ones(2 * hits.layout.page_bytes * (tokens // PAGE_SIZE), dtype=torch.uint8)
        nbytes = hits.get(target)
        calls: dict[str, Callable[[], object]] = {
            "get": lambda: hits.get(target),
            "prefetch": lambda: hits.prefetch(reuse),
        }
        if folder is None:
            sender = PlainSocket(nbytes)
            stack.callback(sender.close)
            return _rates(place, calls | {"socket": sender.read}, nbytes, repeats, hits.cache.clear)
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        calls["file"] = PlainFile(scratch / "plain", nbytes).read
        rows = _rates(place, calls, nbytes, repeats, hits.cache.clear)
        if can_forget():
            rows += _rates(f"{place}, cold", calls, nbytes, repeats, lambda: _forget(hits, folder))
    return rows


def _rates(
    place: str,
    calls: dict[str, Callable[[], object]],
    nbytes: int,
    repeats: int,
    before: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Time `calls`, the last of which is the plain one."""
    taken = medians(calls, repeats, before)
    *ways, plain = calls
    return [_rate(place, way, plain, nbytes, taken[way], taken[plain]) for way in ways]


def _forget(hits: Hits, folder: Path) -> None:
    """Clear host memory, and let the disk be read: what is mapped cannot be forgotten, so the tier is opened anew."""

    def forget_files() -> None:
        for path in folder.rglob("*"):
            if path.is_file():
                forget(path)

    assert hits.tier is not None
    hits.cache.clear()
    hits.tier.reopen(forget_files)


def _rate(place: str, way: str, plain: str, nbytes: int, seconds: float, plain_seconds: float) -> dict[str, Any]:
    return {
        "place": place,
        "way": way,
        "bytes": nbytes,
        "ms": 1000 * seconds,
        "gb_s": nbytes / seconds / 1e9,
        "plain": plain,
        "plain_gb_s": nbytes / plain_seconds / 1e9,
        "share": plain_seconds / seconds,
    }
