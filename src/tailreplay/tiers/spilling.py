"""Writing pages down: slots of host memory, packed, to every tier."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from tailreplay.tiers.base import Tier, TierError, TierPage
from tailreplay.tiers.orders import Spill, cut
from tailreplay.tiers.packing import Packer

log = logging.getLogger("tailreplay")


class Spiller:
    """Writes pages. One thread calls it.

    Parameters
    ----------
    check : bool
        Whether pages are compared with what was stored before they are written.
    counts : Counter
        See `tailreplay.tiers.mover.Mover.counts`.
    """

    def __init__(self, packer: Packer, tiers: Sequence[Tier], check: bool, counts: Counter[str]) -> None:
        self._packer = packer
        self._tiers = tiers
        self._check = check
        self.counts = counts

    def spill(self, orders: Sequence[Spill]) -> set[int]:
        """Write pages to every tier; returns the tags of those that any took. Raises nothing."""
        written: set[int] = set()
        try:
            packed = self._pack(orders)
            for tier in self._tiers:
                for batch in cut(packed, lambda entry: entry[1].nbytes):
                    if self._write(tier, [page for _, page in batch]):
                        written |= {order.tag for order, _ in batch}
        except Exception:
            log.exception("Writing pages failed; they stay in host memory.")
        return written

    def _pack(self, orders: Sequence[Spill]) -> list[tuple[Spill, TierPage]]:
        packed: list[tuple[Spill, TierPage]] = []
        for order in orders:
            try:
                packed.append((order, self._packer.pack(order.record, order.slot, order.hidden_slot, self._check)))
            except ValueError as error:
                self.counts["unfit"] += 1
                log.debug("A page is not written: %s", error)
        return packed

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
