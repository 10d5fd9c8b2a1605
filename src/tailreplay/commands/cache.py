"""`tailreplay cache`: look into the disk cache, check it, and move pages in and out, also while a server uses it."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tailreplay.errors import CacheConfigError
from tailreplay.page_format import WHOLE
from tailreplay.sizes import format_bytes, parse_bytes
from tailreplay.tiers.disk.file import default_path

if TYPE_CHECKING:
    from tailreplay.page_format import PageHeader
    from tailreplay.tiers.base import TierPage
    from tailreplay.tiers.disk import DiskTier
    from tailreplay.tiers.disk.entries import Entry

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_IMPORT_BYTES = 32 * 2**20


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = argparse.ArgumentParser(prog="tailreplay cache", description="Look into the disk cache, and tidy it up.")
    actions = made.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, text: str) -> argparse.ArgumentParser:
        parser = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        parser.add_argument("--path", type=Path, default=default_path(), help="the cache's folder (%(default)s)")
        return parser

    ls = action("ls", "list what is cached, by model and tenant")
    ls.add_argument("--pages", action="store_true", help="list every page")
    ls.add_argument("--json", action="store_true", help="print one JSON list instead of a table")
    stats = action("stats", "count bytes and pages")
    stats.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    verify = action("verify", "read every page and check it; the exit status is 1 if any is damaged and stays")
    verify.add_argument("--drop", action="store_true", help="remove damaged pages")
    prune = action("prune", "remove pages, least recently used first; what several options say must all hold")
    prune.add_argument("--to", type=parse_bytes, metavar="SIZE", help="until no more than this is left, like 2GiB")
    prune.add_argument("--older-than", type=_seconds, metavar="TIME", help="that were not used for so long, like 7d")
    prune.add_argument("--namespace", metavar="PREFIX", help="of the namespace that 'ls' shows")
    prune.add_argument("--all", action="store_true", help="remove everything")
    export = action("export", "write pages to a file that 'import' reads on another machine")
    export.add_argument("file", type=Path)
    export.add_argument("--namespace", metavar="PREFIX", help="only pages of the namespace that 'ls' shows")
    bring = action("import", "add the pages of a file that 'export' wrote")
    bring.add_argument("file", type=Path)
    bring.add_argument("--limit", type=parse_bytes, metavar="SIZE", help="make the cache if there is none, this large")
    return made


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text)
    if found is None:
        raise CacheConfigError(f"{text!r} is not a time: write a number with a unit, like '7d', '12h' or '30m'.")
    return float(found[1]) * _SECONDS[found[2]]


def run(arguments: argparse.Namespace) -> int:
    """Do what is asked; returns the exit status."""
    from tailreplay.tiers.disk import DiskTier

    if arguments.action == "prune" and not (
        arguments.all or arguments.namespace or arguments.to is not None or arguments.older_than is not None
    ):
        raise CacheConfigError("Say what to prune: --to SIZE, --older-than TIME, --namespace PREFIX, or --all.")
    tier = DiskTier(arguments.path, _limit(arguments))
    try:
        return _ACTIONS[arguments.action](tier, arguments)
    finally:
        tier.close()


def _limit(arguments: argparse.Namespace) -> int | None:
    from tailreplay.tiers.disk.file import DATA, folder_at

    asked: int | None = getattr(arguments, "limit", None)
    there = (folder_at(arguments.path) / DATA).exists()
    if arguments.action == "import" and asked is None and not there:
        raise CacheConfigError(f"There is no cache in '{arguments.path}': add --limit SIZE to make one.")
    # An import is no reason to change the limit of a cache that is there.
    return None if there else asked


def _ls(tier: DiskTier, arguments: argparse.Namespace) -> int:
    from tailreplay.commands import cache_listing

    cache_listing.show(tier, arguments.pages, arguments.json)
    return 0


def _stats(tier: DiskTier, arguments: argparse.Namespace) -> int:
    from tailreplay.commands import cache_listing

    cache_listing.show_stats(tier, arguments.json)
    return 0


def _verify(tier: DiskTier, arguments: argparse.Namespace) -> int:
    pages, bad = 0, []
    known: dict[tuple[bytes, str], PageHeader] = {}
    for entry in tier.entries():
        header = _whole(tier, entry)
        pages += 1
        if header is None:
            bad.append(entry.key)
        else:
            known[header.key, header.rank] = header
    orphans = sum(each.parent != each.namespace and (each.parent, each.rank) not in known for each in known.values())
    # A page that was replaced or evicted while it was read is no damaged one.
    bad = [entry.key for entry in tier.entries() if entry.key in set(bad) and _whole(tier, entry) is None]
    print(f"{pages} pages, {len(bad)} of them damaged, {orphans} without the page before them, which cannot be hit.")
    if bad and arguments.drop:
        tier.drop(bad)
        print(f"The {len(bad)} damaged pages were removed.")
    return int(bool(bad) and not arguments.drop)


def _whole(tier: DiskTier, entry: Entry) -> PageHeader | None:
    """Return the page's header if everything about it is right."""
    from tailreplay.tiers.archive import known_header

    parts: dict[str, memoryview] = {}
    for part in entry.parts:
        for view in tier.peek([entry.key], part):
            if view is None or (header := known_header(entry.header, {part: view})) is None:
                return None
    header = known_header(entry.header, parts)
    # The shares of several ranks have keys of their own.
    return header if header is not None and (header.key == entry.key or header.rank != WHOLE) else None


def _prune(tier: DiskTier, arguments: argparse.Namespace) -> int:
    where = None if arguments.namespace is None else _of_namespace(arguments.namespace)
    before = None if arguments.older_than is None else time.time() - arguments.older_than
    pages, freed = tier.prune(arguments.to or 0, before, where)
    print(f"Removed {pages} pages, {format_bytes(freed)}.")
    if pages and not tier.compact():
        print("The file keeps its size while others use it: the room is used again for new pages.")
    return 0


def _of_namespace(prefix: str) -> Callable[[Entry], bool]:
    from tailreplay.page_format import PageFormatError, unpack_header

    def matches(entry: Entry) -> bool:
        try:
            return unpack_header(entry.header).namespace.hex().startswith(prefix.lower())
        except PageFormatError:
            return False

    return matches


def _export(tier: DiskTier, arguments: argparse.Namespace) -> int:
    from tailreplay.tiers.archive import write_archive

    where = _of_namespace(arguments.namespace or "")
    count = write_archive(arguments.file, _pages(tier, where))
    print(f"Wrote {count} pages, {format_bytes(arguments.file.stat().st_size)}, to {arguments.file}.")
    return 0


def _pages(tier: DiskTier, where: Callable[[Entry], bool]) -> Iterator[TierPage]:
    """Yield intact pages, least recently used first."""
    from tailreplay.tiers.archive import known_header
    from tailreplay.tiers.base import TierPage

    for entry in filter(where, tier.entries(oldest_first=True)):
        parts = {part: bytes(view) for part in entry.parts for view in tier.peek([entry.key], part) if view is not None}
        header = known_header(entry.header, parts)
        if header is not None:
            yield TierPage(
                entry.key, entry.header, {part: [data] for part, data in parts.items()}, entry.hints, entry.tenant
            )


def _import(tier: DiskTier, arguments: argparse.Namespace) -> int:
    from tailreplay.tiers.archive import ArchiveError, read_archive

    count, batch = 0, []
    evictions = tier.usage().evictions
    try:
        for page in read_archive(arguments.file):
            batch.append(page)
            count += 1
            if sum(page.nbytes for page in batch) >= _IMPORT_BYTES:
                # The file has the least recently used first, and of one put the first is the last to be evicted.
                tier.put(batch[::-1])
                batch = []
    except ArchiveError as error:
        tier.put(batch[::-1])
        raise ArchiveError(f"{str(error).removesuffix('.')}; {count} pages were imported.") from error
    tier.put(batch[::-1])
    evicted = tier.usage().evictions - evictions
    print(f"Imported {count} pages" + (f"; {evicted} pages were evicted for lack of room." if evicted else "."))
    return 0


_ACTIONS: dict[str, Callable[[DiskTier, argparse.Namespace], int]] = {
    "ls": _ls, "stats": _stats, "verify": _verify, "prune": _prune, "export": _export, "import": _import,
}  # fmt: skip
