"""Who moves pages between host memory and the tiers below it, on threads of its own. Decides nothing."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Sequence

from tailreplay.tiers.base import Tier
from tailreplay.tiers.fetching import Fetcher
from tailreplay.tiers.orders import BATCH_PAGES, Done, Fetch, Spill
from tailreplay.tiers.packing import Packer
from tailreplay.tiers.spilling import Spiller

log = logging.getLogger("tailreplay")
_STUCK_SECONDS = 2.0


class Mover:
    """Obeys orders, in order of their coming: fetches on one thread, spills on another.

    Parameters
    ----------
    tiers : sequence of Tier
        Fastest first; their calls must end (see `tailreplay.tiers.guard`). Closed by `close`.
    seal : bool
        Whether to note checksums of what was fetched, and to compare them before a page is written.

    Attributes
    ----------
    counts : Counter
        Since the start, by tier: "spilled:disk", "spill_bytes:disk", "spill_failed:disk", "fetch_bytes:disk",
        "fetch_failed:disk"; and "damaged" (dropped), "unfit" (a codec cannot hold it).
    """

    def __init__(self, packer: Packer, tiers: Sequence[Tier], seal: bool = True) -> None:
        self._tiers = tiers
        self.counts: Counter[str] = Counter()
        self._fetcher = Fetcher(packer, tiers, seal, self.counts)
        self._spiller = Spiller(packer, tiers, seal, self.counts)
        self._fetches: queue.SimpleQueue[tuple[Sequence[Fetch], Done] | None] = queue.SimpleQueue()
        self._spills: queue.SimpleQueue[tuple[Spill, Done] | None] = queue.SimpleQueue()
        # Nothing is put into a queue after the None that ends its thread.
        self._entry = threading.Lock()
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
        with self._entry:
            refused = self._closing or self._is_stuck()
            if not refused:
                self._fetches.put((orders, done))
        if refused:
            for order in orders:
                _tell(done, order.tag, False)

    def spill(self, order: Spill, done: Done) -> None:
        """Write a page to the tiers, some time later; `done` says whether any tier took it."""
        with self._entry:
            refused = self._closing
            if not refused:
                self._spills.put((order, done))
        if refused:
            _tell(done, order.tag, False)

    def close(self, seconds: float = 10.0) -> None:
        """Finish what was ordered, within `seconds`; end the threads and close the tiers. A second call does nothing."""
        with self._entry:
            if self._closing:
                return
            self._closing = True
            self._fetches.put(None)
            self._spills.put(None)
        for thread in self._threads:
            thread.join(seconds)
        for tier in self._tiers:
            tier.close()

    # ---- on its threads

    def _run_fetches(self) -> None:
        while (job := self._fetches.get()) is not None:
            orders, done = job
            self._busy_since = time.monotonic()
            for batch, good in self._fetcher.fetch(orders):
                for order in batch:
                    _tell(done, order.tag, order.tag in good)
                self._busy_since = time.monotonic()
            self._busy_since = None

    def _is_stuck(self) -> bool:
        """Whether a medium behind a memory map keeps the thread waiting: no deadline ends that; others need not wait."""
        since = self._busy_since
        return since is not None and time.monotonic() - since > _STUCK_SECONDS

    def _run_spills(self) -> None:
        ended = False
        while not ended:
            jobs = [self._spills.get()]
            while len(jobs) < BATCH_PAGES and jobs[-1] is not None and not self._spills.empty():
                jobs.append(self._spills.get())
            ended = jobs[-1] is None
            spills = [job for job in jobs if job is not None]
            written = self._spiller.spill([order for order, _ in spills])
            for order, done in spills:
                _tell(done, order.tag, order.tag in written)


def _tell(done: Done, tag: int, good: bool) -> None:
    """Call `done`. An error there must not end a mover's thread: nothing would ever be moved again."""
    try:
        done(tag, good)
    except Exception:
        log.exception("Noting what became of a page failed.")
