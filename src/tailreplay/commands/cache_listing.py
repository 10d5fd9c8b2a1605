"""What `tailreplay cache ls` and `stats` print."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from tailreplay.commands.console import console
from tailreplay.page_format import PageFormatError, PageHeader, unpack_header
from tailreplay.sizes import format_bytes
from tailreplay.tiers.base import HIDDEN, KV

if TYPE_CHECKING:
    from tailreplay.tiers.disk import DiskTier
    from tailreplay.tiers.disk.entries import Entry

_SHORT = 12


def show(tier: DiskTier, pages: bool, as_json: bool) -> None:
    """Print one line a namespace, or a page."""
    rows = [_page(entry) for entry in tier.entries(oldest_first=True)] if pages else namespaces(tier)
    if as_json:
        print(json.dumps(rows))
    elif not rows:
        print("The cache is empty.")
    elif pages:
        _print_pages(rows)
    else:
        _print_namespaces(rows)


def show_stats(tier: DiskTier, as_json: bool) -> None:
    """Print what the tier holds."""
    usage = tier.usage()
    report = {
        "path": str(tier.path),
        "bytes_used": usage.bytes_used,
        "bytes_limit": usage.bytes_limit,
        "file_bytes": tier.file_bytes,
        "pages": usage.pages,
        "evictions": usage.evictions,
        "by_tenant": {name.hex(): nbytes for name, nbytes in usage.by_tenant.items()},
    }
    if as_json:
        print(json.dumps(report))
        return
    print(f"{tier.path}: {usage.pages} pages, {format_bytes(usage.bytes_used or 0)} of {format_bytes(tier.limit)}")
    print(f"file: {format_bytes(tier.file_bytes)}; evictions so far: {usage.evictions}")
    for name, nbytes in sorted(usage.by_tenant.items(), key=lambda item: -item[1]):
        print(f"tenant {name.hex()}: {format_bytes(nbytes)}")


def namespaces(tier: DiskTier) -> list[dict[str, Any]]:
    """Return one record a namespace, the one with most bytes first; pages with unreadable headers have one too."""
    rows: dict[str, dict[str, Any]] = {}
    for entry in tier.entries():
        header = _header(entry)
        row = rows.setdefault(header.namespace.hex() if header else "", _row(header))
        row["pages"] += 1
        row["bytes"] += entry.nbytes
        for part in (KV, HIDDEN):
            row[f"{part}_bytes"] += entry.sizes.get(part, 0)
        row["used"] = max(row["used"], entry.used)
        if header is not None:
            row["tokens"] += header.tokens
            row["page_tokens"] = max(row["page_tokens"], header.tokens)
            row["provenance"][str(header.provenance)] += 1
            row["created"] = min(row["created"] or header.created, header.created)
    return sorted(rows.values(), key=lambda row: -row["bytes"])


def _row(header: PageHeader | None) -> dict[str, Any]:
    return {
        "namespace": header.namespace.hex() if header else "",
        "label": header.label if header else "(unreadable: see 'verify')",
        "tenant": header.tenant.hex() if header else "",
        **dict.fromkeys(("page_tokens", "pages", "tokens", "bytes", "kv_bytes", "hidden_bytes"), 0),
        "provenance": Counter(),
        "used": 0.0,
        "created": None,
    }


def _header(entry: Entry) -> PageHeader | None:
    try:
        return unpack_header(entry.header)
    except PageFormatError:
        return None


def _page(entry: Entry) -> dict[str, Any]:
    header = _header(entry)
    row = {
        "key": entry.key.hex(),
        "bytes": entry.nbytes,
        "parts": sorted(entry.parts),
        "tenant": entry.tenant.hex(),
        "used": entry.used,
        "readable": header is not None,
    }
    if header is not None:
        row |= {
            "parent": header.parent.hex(),
            "namespace": header.namespace.hex(),
            "label": header.label,
            "start": header.start,
            "tokens": header.tokens,
            "rank": header.rank,
            "provenance": str(header.provenance),
            "created": header.created,
        }
    return row


def _print_namespaces(rows: list[dict[str, Any]]) -> None:
    table = _table("namespace", "model", "page", "pages", "tokens", "bytes", "kv / hidden", "numbers", "used", "since")
    for row in rows:
        table.add_row(
            row["namespace"][:_SHORT],
            row["label"],
            str(row["page_tokens"]),
            f"{row['pages']:,}",
            f"{row['tokens']:,}",
            format_bytes(row["bytes"]),
            f"{format_bytes(row['kv_bytes'])} / {format_bytes(row['hidden_bytes'])}",
            ", ".join(f"{count} {name}" for name, count in sorted(row["provenance"].items())),
            _ago(row["used"]),
            _ago(row["created"] or 0),
        )
    console().print(table)


def _print_pages(rows: list[dict[str, Any]]) -> None:
    table = _table("key", "parent", "namespace", "tokens", "bytes", "parts", "numbers", "used")
    for row in rows:
        start, tokens = row.get("start", 0), row.get("tokens", 0)
        table.add_row(
            row["key"][:_SHORT],
            row.get("parent", "")[:_SHORT],
            row.get("namespace", "unreadable")[:_SHORT],
            f"{start}-{start + tokens}",
            format_bytes(row["bytes"]),
            " ".join(row["parts"]),
            row.get("provenance", ""),
            _ago(row["used"]),
        )
    console().print(table)


def _table(*columns: str) -> Any:
    from rich.table import Table

    table = Table()
    for column in columns:
        table.add_column(column, justify="left" if column in ("namespace", "model", "key", "parent") else "right")
    return table


def _ago(moment: float) -> str:
    """Say how long ago `moment` was, in seconds since the epoch: ``3 h``."""
    if not moment:
        return ""
    seconds = max(0.0, time.time() - moment)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
