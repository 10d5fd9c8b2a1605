"""The disk tier against plain files: throughput of pages, and the time that opening takes."""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from tailreplay.sizes import format_bytes, parse_bytes
from tailreplay.tiers.base import TierPage
from tailreplay.tiers.disk import DiskTier

_SMALL_PAGES = 100_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's arguments."""
    parser.add_argument("--sizes", type=parse_bytes, nargs="+", default=[2**20, 2**17], help="bytes a page")
    parser.add_argument("--bytes", type=parse_bytes, default=2**28, help="bytes that are put each time")
    parser.add_argument("--batch", type=int, default=16, help="pages a put")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to make the files (the system's folder for temporary files)")
    parser.add_argument("--json", action="store_true", help="print one JSON list instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    rows = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for size in arguments.sizes:
            rows += _page_rows(Path(folder), size, arguments)
        rows.append(_opening(Path(folder) / "small"))
    if arguments.json:
        print(json.dumps(rows))
        return 0
    for row in rows:
        rate = f"{row['mb_per_s']:9.0f} MB/s" if "mb_per_s" in row else " " * 14
        print(f"{row['what']:<44} {row['ms']:9.3f} ms {rate}")
    return 0


def _page_rows(folder: Path, size: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    count = max(arguments.bytes // size, arguments.batch)
    data = [random.randbytes(size) for _ in range(8)]
    pages = [TierPage(i.to_bytes(32, "big"), b"h" * 900, {"kv": [data[i % 8]]}) for i in range(count)]
    tier = DiskTier(folder / f"pages{size}", 4 * arguments.bytes + 2**26)
    file, target = folder / f"file{size}", bytearray(size)
    times: dict[str, list[float]] = {}

    def timed(what: str, action: Callable[[], None]) -> None:
        begin = time.perf_counter()
        action()
        times.setdefault(what, []).append(time.perf_counter() - begin)

    def put() -> None:
        for at in range(0, count, arguments.batch):
            tier.put(pages[at : at + arguments.batch])

    def get() -> None:
        for view in tier.get([page.key for page in pages], "kv"):
            assert view is not None
            target[:] = view

    def single() -> None:
        for page in pages[:: max(1, count // 64)]:
            for view in tier.get([page.key], "kv"):
                assert view is not None
                target[:] = view

    for _ in range(arguments.rounds):
        tier.prune()
        timed("put", put)
        timed("write and sync a file", lambda: _write(file, pages, arguments.batch))
        timed("get", get)
        timed("read a file", lambda: _read(file, size, target))
        timed("copy memory", lambda: _copy(data, count, target))
        timed("get one", single)
    tier.close()
    singles = len(pages[:: max(1, count // 64)])
    return [
        {
            "what": f"{what}, pages of {format_bytes(size)}",
            "ms": 1000 * median(seconds) / (singles if what == "get one" else count),
            "mb_per_s": size * (singles if what == "get one" else count) / median(seconds) / 1e6,
        }
        for what, seconds in times.items()
    ]


def _write(file: Path, pages: list[TierPage], batch: int) -> None:
    file.unlink(missing_ok=True)
    with file.open("wb", buffering=0) as stream:
        for at in range(0, len(pages), batch):
            for page in pages[at : at + batch]:
                stream.write(page.parts["kv"][0])
            os.fdatasync(stream.fileno())


def _read(file: Path, size: int, target: bytearray) -> None:
    with file.open("rb", buffering=0) as stream:
        while stream.readinto(target) == size:
            pass


def _copy(data: list[bytes], count: int, target: bytearray) -> None:
    for i in range(count):
        target[:] = data[i % len(data)]


def _opening(folder: Path) -> dict[str, Any]:
    """Return how long it takes to open a folder of many pages, and to say how many there are."""
    tier = DiskTier(folder, 2**30)
    for at in range(0, _SMALL_PAGES, 5000):
        tier.put([TierPage(i.to_bytes(32, "big"), b"h" * 900, {"kv": [b"kv"]}) for i in range(at, at + 5000)])
    tier.close()
    took = []
    for _ in range(5):
        begin = time.perf_counter()
        tier = DiskTier(folder, 2**30)
        assert tier.usage().pages == _SMALL_PAGES
        took.append(time.perf_counter() - begin)
        tier.close()
    return {"what": f"open a folder of {_SMALL_PAGES:,} pages", "ms": 1000 * median(took)}
