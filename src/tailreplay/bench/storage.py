"""Storage: bytes a token, how fast each tier hands pages over, what a hit waits for, and look-ups in a full store."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

_BYTE_SHAPES = ("qwen3.5-4b", "qwen3.6-27b")
PARTS = ("bytes", "bandwidth", "latency", "find")
_LIMIT = "disk:{}?limit={}"
HOST_SHARE = 0.8
"""Of memcpy's speed, for reading from host memory."""

_COLUMNS: dict[str, dict[str, tuple[str, str]]] = {
    "bytes": {
        "shape": ("shape", ""),
        "kv_codec": ("KV codec", ""),
        "hidden_codec": ("hidden codec", ""),
        "kv": ("KV", ",d"),
        "hidden": ("hiddens", ",d"),
        "ratio": ("ratio", ".2f"),
        "shared": ("share 1/4", ".2f"),
        "header": ("header", ",d"),
        "padding": ("padding", ",d"),
        "stored": ("stored", ".3f"),
    },
    "bandwidth": {
        "place": ("place", ""),
        "way": ("way", ""),
        "ms": ("ms", ".1f"),
        "gb_s": ("GB/s", ".2f"),
        "plain": ("beside", ""),
        "plain_gb_s": ("its GB/s", ".2f"),
        "share": ("of that", ".0%"),
    },
    "latency": {
        "place": ("place", ""),
        "lookup_ms": ("look-up, ms", ".1f"),
        "find_ms": ("find", ".1f"),
        "get_ms": ("get", ".1f"),
        "rest_ms": ("rest", ".1f"),
        "read_ms": ("read, ms", ".1f"),
        "moved": ("moved up, B", ",d"),
        "read_bytes": ("read, B", ",d"),
    },
    "find": {
        "pages": ("pages in the store", ",d"),
        "tokens": ("tokens", ",d"),
        "ms": ("find, ms", ".2f"),
        "ratio": ("ratio", ".2f"),
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    from tailreplay.bench.page_shapes import PAGE_SHAPES

    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="which tables")
    parser.add_argument(
        "--tier", action="append", metavar="ADDRESS", help="may be repeated (a disk tier in a temporary folder)"
    )
    parser.add_argument("--shape", choices=tuple(PAGE_SHAPES), default="qwen3.5-4b", help="of the pages that are moved")
    parser.add_argument("--tokens", type=int, default=4096, help="of the prefix; a multiple of 64")
    parser.add_argument("--ratio", type=float, default=0.05, help="share of the prefix that a hit replays")
    parser.add_argument(
        "--codec", choices=("none", "int8", "fp8_e4m3"), default="int8", help="of hiddens in tiers, for the latencies"
    )
    parser.add_argument(
        "--pages", type=int, nargs="+", default=[1000, 100_000], help="in the store that is looked up in"
    )
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    from tailreplay.bench.codecs import one_thread

    _check(arguments)
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        report = _measure(arguments, arguments.tier or [_LIMIT.format(folder, _disk_limit(arguments))])
    if arguments.json:
        print(json.dumps(report))
    else:
        _print_tables(report)
    return 0


def _measure(arguments: argparse.Namespace, tiers: Sequence[str]) -> dict[str, Any]:
    from tailreplay.bench.storage_bandwidth import bandwidth_rows
    from tailreplay.bench.storage_bytes import TARGETS, byte_rows
    from tailreplay.bench.storage_find import find_rows
    from tailreplay.bench.storage_hits import latency_rows

    shape, tokens, repeats = arguments.shape, arguments.tokens, arguments.repeats
    measures = {
        "bytes": lambda: byte_rows(tuple(dict.fromkeys((*_BYTE_SHAPES, shape)))),
        "bandwidth": lambda: bandwidth_rows(shape, tokens, tiers, repeats),
        "latency": lambda: latency_rows(shape, tokens, tiers, repeats, arguments.codec, arguments.ratio),
        "find": lambda: find_rows(tokens, arguments.pages, repeats),
    }
    report: dict[str, Any] = {
        "shape": shape,
        "tokens": tokens,
        "ratio": arguments.ratio,
        "codec": arguments.codec,
        "repeats": repeats,
        "load": round(os.getloadavg()[0], 2),
        "targets": {"ratio": TARGETS, "host_share": HOST_SHARE},
    }
    for name in PARTS:
        if name in arguments.only:
            print(f"measuring {name} …", file=sys.stderr, flush=True)
            report[name] = measures[name]()
    return report


def _check(arguments: argparse.Namespace) -> None:
    from tailreplay.bench.storage_hits import PAGE_SIZE
    from tailreplay.errors import InvalidRequestError

    if arguments.tokens < PAGE_SIZE or arguments.tokens % PAGE_SIZE:
        raise InvalidRequestError(f"The prefix must be a positive multiple of {PAGE_SIZE} tokens.")
    if arguments.repeats < 1 or not 0 < arguments.ratio <= 1:
        raise InvalidRequestError("There must be at least 1 repeat, and the ratio lies in (0, 1].")
    if min(arguments.pages) < arguments.tokens // PAGE_SIZE:
        raise InvalidRequestError("The store cannot hold fewer pages than the prefix has.")


def _disk_limit(arguments: argparse.Namespace) -> int:
    from tailreplay.bench.page_shapes import PAGE_SHAPES

    # Twice the room: LMDB keeps some of it free.
    page_bytes: int = PAGE_SHAPES[arguments.shape].layout(1).page_bytes
    return (64 << 20) + 2 * int(arguments.tokens) * page_bytes


def _print_tables(report: dict[str, Any]) -> None:
    from rich.table import Table

    from tailreplay.commands.console import console

    prefix = f"{report['tokens']:,} tokens of {report['shape']}"
    titles = {
        "bytes": "bytes a token (header and padding: a page of 64); ratios to bfloat16 keys and values alone",
        "bandwidth": f"all parts of {prefix}; medians of {report['repeats']}, load {report['load']:g}",
        "latency": f"hit on {prefix}, r = {report['ratio']:.0%}, hiddens in tiers {report['codec']}",
        "find": "Finder.find of a prompt that a disk tier holds",
    }
    for name, columns in _COLUMNS.items():
        if name not in report:
            continue
        table = Table(title=titles[name])
        for heading, _ in columns.values():
            table.add_column(heading, justify="right")
        for row in report[name]:
            table.add_row(*(format(row[key], style) for key, (_, style) in columns.items()))
        console().print(table)
