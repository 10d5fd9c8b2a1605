"""Who moves pages between host memory and the tiers below it, on threads of its own. Decides nothing."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tailreplay.page_format import PageFormatError, PageHeader, is_intact, unpack_header
from tailreplay.tiers.base import HIDDEN, KV, Found, Tier, TierError, TierPage
from tailreplay.tiers.naming import PageRecord, rank_key
from tailreplay.tiers.packing import Packer, WorsePageError

log = logging.getLogger("tailreplay")
_BATCH_BYTES = 8 << 20
_BATCH_PAGES = 64


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring one page into host memory.

    Attributes
    ----------
    tag : int
        Names it in what comes back.
    slots : tuple of (str, int, int, int)
        (part, slot, index of the tier, bytes) of each part to bring.
    """

    tag: int
    record: PageRecord
    slots: tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Spill:
    """Write one page to every tier. Its slots must not change until it comes back as done."""

    tag: int
    record: PageRecord
    slot: int
    hidden_slot: int


Done = Callable[[int, bool], None]
"""``done(tag, good)``, on a thread of the mover's (or the caller's, if it refuses)."""

_T = TypeVar("_T")
_STUCK_SECONDS = 2.0


class Mover:
    """Obeys orders, in order of their coming: fetches on one thread, spills on another.

    Parameters
    ----------
    tiers : sequence of Tier
        Fastest first; their calls must end (see `tailreplay.tiers.guard`).
    seal : bool
        Whether to note checksums of what was fetched.

    Attributes
    ----------
    counts : Counter
        ``fetched``, ``spilled``, ``spill_bytes``, ``fetch_bytes`` by tier, ``damaged``, ``unfit`` …, since the start.
    """

    def __init__(self, packer: Packer, tiers: Sequence[Tier], seal: bool = True) -> None:
        self._packer = packer
        self._tiers = tiers
        self._seal = seal
        self.counts: Counter[str] = Counter()
        self._fetches: queue.SimpleQueue[tuple[Sequence[Fetch], Done] | None] = queue.SimpleQueue()
        self._spills: queue.SimpleQueue[tuple[Spill, Done] | threading.Event | None] = queue.SimpleQueue()
        self._closing = False
        self._busy_since: float | None = None
        self._threads = [
            threading.Thread(target=self._run_fetches, name="tailreplay-fetch", daemon=True),
            threading.Thread(target=self._run_spills, name="tailreplay-spill", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def fetch(self, orders: Sequence[Fetch], done: Done) -> None:
        """Bring pages into host memory; `done` is called once for each. What cannot be had comes back as not good."""
        if self._closing or self._is_stuck():
            for order in orders:
                done(order.tag, False)
        else:
            self._fetches.put((orders, done))

    def spill(self, order: Spill, done: Done) -> None:
        """Write a page to the tiers, some time later; `done` says whether any tier took it."""
        if self._closing:
            done(order.tag, False)
        else:
            self._spills.put((order, done))

    def flush(self, seconds: float) -> bool:
        """Wait until all spills so far are done. False if that takes longer."""
        reached = threading.Event()
        self._spills.put(reached)
        return self._closing or reached.wait(seconds)

    def close(self, seconds: float = 10.0) -> None:
        """Finish what was ordered, within `seconds`; end the threads and close the tiers. A second call does nothing."""
        if not self._closing:
            self._closing = True
            self._fetches.put(None)
            self._spills.put(None)
            for thread in self._threads:
                thread.join(seconds)
            for tier in self._tiers:
                tier.close()

    # ---- fetching

    def _run_fetches(self) -> None:
        while (job := self._fetches.get()) is not None:
            orders, done = job
            for batch in _batches(orders):
                self._busy_since = time.monotonic()
                try:
                    good = self._fetch(batch)
                except Exception:
                    # Nothing would ever be fetched again without this thread.
                    log.exception("Fetching pages failed.")
                    good = set()
                self._busy_since = None
                for order in batch:
                    _tell(done, order.tag, order.tag in good)

    def _is_stuck(self) -> bool:
        """Whether a medium behind a memory map keeps the thread waiting: no deadline ends that; others need not wait."""
        since = self._busy_since
        return since is not None and time.monotonic() - since > _STUCK_SECONDS

    def _fetch(self, orders: Sequence[Fetch]) -> set[int]:
        """Bring a batch; returns the tags of pages all of whose parts have come."""
        missing: set[int] = set()
        # Hiddens first: they are what a replay begins with.
        for part in (HIDDEN, KV):
            for index, tier in enumerate(self._tiers):
                wanted = [
                    (order, slot)
                    for order in orders
                    for name, slot, source, _ in order.slots
                    if (name, source) == (part, index)
                ]
                if wanted:
                    missing |= self._fetch_part(tier, part, wanted)
        return {order.tag for order in orders} - missing

    def _fetch_part(self, tier: Tier, part: str, wanted: Sequence[tuple[Fetch, int]]) -> set[int]:
        missing = {order.tag for order, _ in wanted}
        try:
            keys = [rank_key(order.record.key, self._packer.rank) for order, _ in wanted]
            headers = [
                self._header(tier, key, found, order)
                for key, found, (order, _) in zip(keys, tier.contains(keys), wanted, strict=True)
            ]
            there = [i for i, header in enumerate(headers) if header is not None and part in header.parts]
            for i, data in zip(there, tier.get([keys[i] for i in there], part), strict=True):
                header, (order, slot) = headers[i], wanted[i]
                if header is not None and data is not None and self._take(tier, part, header, keys[i], data, slot):
                    missing.discard(order.tag)
        except TierError as error:
            log.debug("Fetching from %s: %s", tier.name, error)
            self.counts[f"fetch_failed:{tier.name}"] += len(missing)
        return missing

    def _header(self, tier: Tier, key: bytes, found: Found | None, order: Fetch) -> PageHeader | None:
        """Return the page's checked header; None, and the page is dropped, if it is not what was looked up."""
        if found is None:
            return None
        try:
            header = unpack_header(found.header)
            self._packer.check(header, order.record)
        except WorsePageError as error:
            log.debug("Not fetched: %s", error)
            return None
        except PageFormatError as error:
            self._condemn(tier, key, str(error))
            return None
        return header

    def _take(self, tier: Tier, part: str, header: PageHeader, key: bytes, data: memoryview, slot: int) -> bool:
        entry = header.parts[part]
        if not is_intact(entry, data):
            if self._is_there(tier, key, header):
                self._condemn(tier, key, "its bytes are not what was stored")
            return False
        self._packer.unpack(part, entry, data, slot)
        if self._seal:
            self._packer.seal(part, slot, header.tokens)
        self.counts[f"fetch_bytes:{tier.name}"] += entry.nbytes
        return True

    @staticmethod
    def _is_there(tier: Tier, key: bytes, header: PageHeader) -> bool:
        """Whether a page still has this header: else somebody has replaced it between the two reads."""
        (found,) = tier.contains([key])
        try:
            return found is not None and unpack_header(found.header) == header
        except PageFormatError:
            return True

    def _condemn(self, tier: Tier, key: bytes, why: str) -> None:
        """Drop a page that must not be used."""
        if not self.counts["damaged"]:
            log.warning("A page in the %s tier is dropped: %s (further ones are only counted).", tier.name, why)
        self.counts["damaged"] += 1
        try:
            tier.drop([key])
        except TierError:
            log.debug("The page could not be dropped.")

    # ---- writing

    def _run_spills(self) -> None:
        ended = False
        while not ended:
            jobs = [self._spills.get()]
            while len(jobs) < _BATCH_PAGES and jobs[-1] is not None and not self._spills.empty():
                jobs.append(self._spills.get())
            ended = jobs[-1] is None
            self._spill([job for job in jobs if isinstance(job, tuple)])
            for job in jobs:
                if isinstance(job, threading.Event):
                    job.set()

    def _spill(self, jobs: Sequence[tuple[Spill, Done]]) -> None:
        written: set[int] = set()
        try:
            self._write_all([order for order, _ in jobs], written)
        except Exception:
            # Nothing would ever be written again without this thread.
            log.exception("Writing pages failed.")
        for order, done in jobs:
            _tell(done, order.tag, order.tag in written)

    def _write_all(self, orders: Sequence[Spill], written: set[int]) -> None:
        """Write pages to every tier. Adds the tags of those that any tier took to `written`."""
        packed: list[tuple[Spill, TierPage]] = []
        for order in orders:
            try:
                packed.append((order, self._packer.pack(order.record, order.slot, order.hidden_slot, self._seal)))
            except ValueError as error:
                self.counts["unfit"] += 1
                log.debug("A page is not written: %s", error)
        for tier in self._tiers:
            for batch in _batches_of(packed):
                if self._write(tier, [page for _, page in batch]):
                    written |= {order.tag for order, _ in batch}

    def _write(self, tier: Tier, pages: Sequence[TierPage]) -> bool:
        """Write what `tier` lacks, or has in a worse form (see `tailreplay.tiers.merging`). False if it fails."""
        try:
            tier.put(pages)
        except TierError as error:
            log.debug("Writing to %s: %s", tier.name, error)
            self.counts[f"spill_failed:{tier.name}"] += len(pages)
            return False
        self.counts[f"spilled:{tier.name}"] += len(pages)
        self.counts[f"spill_bytes:{tier.name}"] += sum(page.nbytes for page in pages)
        return True


def _tell(done: Done, tag: int, good: bool) -> None:
    try:
        done(tag, good)
    except Exception:
        log.exception("Noting what became of a page failed.")


def _batches(orders: Sequence[Fetch]) -> list[list[Fetch]]:
    """Cut orders into runs of a few MiB, so that each ends within a tier's deadline."""
    return _cut(orders, lambda order: sum(size for *_, size in order.slots))


def _batches_of(packed: Sequence[tuple[Spill, TierPage]]) -> list[list[tuple[Spill, TierPage]]]:
    return _cut(packed, lambda entry: entry[1].nbytes)


def _cut(items: Sequence[_T], size_of: Callable[[_T], int]) -> list[list[_T]]:
    runs: list[list[_T]] = []
    room = 0
    for item in items:
        size = size_of(item)
        if not runs or size > room or len(runs[-1]) == _BATCH_PAGES:
            runs.append([])
            room = _BATCH_BYTES
        runs[-1].append(item)
        room -= size
    return runs
