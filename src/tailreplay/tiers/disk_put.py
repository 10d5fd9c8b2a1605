"""Putting pages into a disk tier's file: in batches, evicting what stands in the way, and again where that fails."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from typing import Any

from tailreplay.sizes import format_bytes
from tailreplay.tiers.base import PARTS, TierError, TierFullError, TierPage
from tailreplay.tiers.disk_env import DiskEnv
from tailreplay.tiers.disk_errors import NoSpaceError
from tailreplay.tiers.disk_eviction import Evictor, Quotas
from tailreplay.tiers.disk_records import KEY_BYTES
from tailreplay.tiers.disk_touches import BATCH as TOUCHES
from tailreplay.tiers.disk_touches import Touches
from tailreplay.tiers.disk_writer import Writer, file_pages

log = logging.getLogger("tailreplay")

_ATTEMPTS = 8
_BATCH_BYTES, _BATCH_PAGES = 64 * 2**20, 256
# File pages that stay free whatever the limit: a transaction writes anew every table page that it changes.
_SPARE_PAGES = 96
_FIT_PAGES = 2**14


class Putter:
    """Puts pages, and keeps the file below its limit.

    Parameters
    ----------
    quotas : Quotas
    touches : Touches
        Written along with the pages.
    """

    def __init__(self, quotas: Quotas, touches: Touches) -> None:
        self._quotas, self._touches = quotas, touches
        # File pages that stay free beyond the usual share, since writes have found no room.
        self._narrowed = 0

    def room(self, env: DiskEnv) -> int:
        """Return how many file pages may hold something: the limit, less what stays free."""
        pages = env.limit // env.page_bytes
        return pages - max(pages // 16, _SPARE_PAGES) - self._narrowed

    def put(self, env: DiskEnv, pages: Sequence[TierPage], over: bool) -> None:
        """Store pages `over` what is there, or only what it lacks; raises as `DiskTier.put`."""
        refused = [page for page in pages if self._too_large(env, page)]
        kept = [page for page in pages if not self._too_large(env, page)] if refused else pages
        for batch in _batches(kept, min(_BATCH_BYTES, env.limit // 64)):
            self._put_batch(env, batch, over)
        # Each batch is newer than the one before it, but of a chain the start shall outlive the end.
        self._touches.add([page.key for page in kept])
        if refused:
            size = format_bytes(max(page.nbytes for page in refused))
            raise TierFullError(
                f"{len(refused)} pages of up to {size} are larger than the disk cache's limit: raise it."
            )

    def _too_large(self, env: DiskEnv, page: TierPage) -> bool:
        if len(page.key) != KEY_BYTES or len(page.tenant) != 8 or any(len(hint) != KEY_BYTES for hint in page.hints):
            raise TierError("A page's key and hints have 32 bytes, its tenant 8.")
        if not set(page.parts) <= set(PARTS):
            raise TierError(f"The parts of a page are {PARTS}.")
        pages = env.limit // env.page_bytes - _SPARE_PAGES
        mine = self._quotas.limits.get(page.tenant)
        return file_pages(page, env.page_bytes) > pages or (mine is not None and page.nbytes > mine)

    def _put_batch(self, env: DiskEnv, batch: Sequence[TierPage], over: bool) -> None:
        need = sum(file_pages(page, env.page_bytes) for page in batch)
        for attempt in range(_ATTEMPTS):
            try:
                with env.write(len(batch) + len(self._touches), sum(page.nbytes for page in batch)) as txn:
                    self._write_batch(env, Writer(txn, env.tables), batch, over)
                return
            except NoSpaceError:
                if attempt == _ATTEMPTS - 1:
                    raise
            if attempt and len(batch) > 1:
                # Each page changes some of every table, and what is changed is written anew: half of them takes less.
                self._put_batch(env, batch[: len(batch) // 2], over)
                self._put_batch(env, batch[len(batch) // 2 :], over)
                return
            self._free(env, need, batch[0].tenant, attempt)

    def _write_batch(self, env: DiskEnv, writer: Writer, batch: Sequence[TierPage], over: bool) -> None:
        self._touches.write(writer)
        keys = [page.key for page in batch]
        writer.touch(keys)
        evictor = Evictor(writer, self._quotas, set(keys))
        for page, tick in zip(batch, writer.ticks(len(batch)), strict=True):
            old = writer.record(page.key)
            need = 0 if old and not over and old.parts >= set(page.parts) else file_pages(page, env.page_bytes)
            room = evictor.make_room(partial(self._fits, env, writer, need), page.tenant)
            if not room and evictor.blocked:
                raise TierFullError("The disk cache is full, and what is left in it is reserved for other tenants.")
            writer.insert(page, tick, over)
        evictor.cut_to_limit(batch[0].tenant)
        writer.save()

    def _fits(self, env: DiskEnv, writer: Writer, need: int) -> bool:
        return env.live_pages(writer.txn) + need <= self.room(env)

    def _free(self, env: DiskEnv, need: int, tenant: bytes, attempt: int) -> None:
        """Evict at least `need` file pages after a write found no room: what is free lies scattered, or is still read."""
        env.check_readers()
        pages = env.limit // env.page_bytes
        # Leave more free from now on, or every other write would fail first.
        self._narrowed = min(self._narrowed + pages // 64, pages // 4)
        last, step, goal = attempt == _ATTEMPTS - 2, _FIT_PAGES, None
        while step:
            try:
                with env.write(TOUCHES) as txn:
                    live = env.live_pages(txn)
                    if goal is None:
                        goal = 0 if last else min(live - need * (attempt + 1), self.room(env) - need)
                    evicted = self._evict(env, txn, goal, step, tenant)
            except NoSpaceError:
                # To evict takes room, too: the fewer pages, the less.
                step //= 8
                continue
            if evicted < step:
                break
        # What one transaction frees, only the next but one may write over.
        with suppress(NoSpaceError), env.write() as txn:
            Writer(txn, env.tables).save()

    def _evict(self, env: DiskEnv, txn: Any, goal: int, most: int, tenant: bytes) -> int:
        """Evict until `goal` file pages hold something, but no more than `most` pages; returns how many went."""
        writer = Writer(txn, env.tables)
        before = writer.all.evictions
        Evictor(writer, self._quotas).make_room(
            lambda: env.live_pages(txn) <= goal or writer.all.evictions - before >= most, tenant
        )
        writer.save()
        return writer.all.evictions - before

    def fit(self, env: DiskEnv) -> None:
        """Shrink a file that was made with a larger limit."""
        if env.file_bytes <= env.limit:
            return
        while self._evict_some(env):
            pass
        if not env.compact():
            log.warning(
                "The cache file in %s stays at %s, above its limit of %s, until it is opened without other users.",
                env.path, format_bytes(env.file_bytes), format_bytes(env.limit),
            )  # fmt: skip

    def _evict_some(self, env: DiskEnv) -> bool:
        """Evict towards `room`; whether it helped. A transaction that evicted everything would need much room itself."""
        with env.write(TOUCHES) as txn:
            writer = Writer(txn, env.tables)
            before = env.live_pages(txn)
            goal = max(self.room(env), before - _FIT_PAGES)
            Evictor(writer, self._quotas).make_room(lambda: env.live_pages(txn) <= goal, None)
            writer.save()
            return env.live_pages(txn) < before


def _batches(pages: Sequence[TierPage], nbytes: int) -> Iterator[list[TierPage]]:
    """Cut into runs of one tenant and of about `nbytes`, a page at least."""
    for _, run in groupby(pages, key=lambda page: page.tenant):
        batch: list[TierPage] = []
        size = 0
        for page in run:
            if batch and (size + page.nbytes > nbytes or len(batch) >= _BATCH_PAGES):
                yield batch
                batch, size = [], 0
            batch.append(page)
            size += page.nbytes
        yield batch
