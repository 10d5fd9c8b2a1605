"""Which states of running requests are saved as anchors. Moves no bytes itself."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from tailreplay.anchor import Anchor
from tailreplay.catalog import Catalog
from tailreplay.engines.vllm.messages import Save
from tailreplay.engines.vllm.tracked import Tracked
from tailreplay.keys import token_bytes

log = logging.getLogger("vllm.tailreplay")
# Chunks may be as short as what other requests leave of a step: not each is worth a copy of all states.
LEAST_GAP = 256


class AnchorWriter:
    """Orders saves and follows them until every rank has ended them.

    Parameters
    ----------
    ranks : int
        How many must have stored their share of an anchor.
    lossy : bool
        Whether host memory holds anchors in a lossy codec.
    interval : int
        See `settings.Settings.anchor_interval`.
    """

    def __init__(self, catalog: Catalog, ranks: int, lossy: bool, interval: int = 0) -> None:
        self._least = min(interval or LEAST_GAP, LEAST_GAP)
        self._catalog = catalog
        self._ranks = ranks
        self._lossy = lossy
        self._saves: dict[int, Anchor] = {}
        self._ended: dict[int, tuple[int, int]] = {}
        self._tag = 0

    def is_due(self, tracked: Tracked) -> bool:
        """Whether to save a request's states after the chunk of its prompt that this step computes."""
        ends = tracked.computed >= tracked.request.num_prompt_tokens
        return ends or tracked.computed - tracked.saved >= self._least

    def order(self, tracked: Tracked, position: int, states: Mapping[int, int]) -> Save | None:
        """Return the order to save a request's states after `position` tokens; None if they need not be, or cannot.

        Parameters
        ----------
        states : mapping
            Block of each state group that holds exactly these when the order is obeyed.
        """
        tracked.saved = position
        start = tracked.stored
        known = start <= position <= min(tracked.request.num_tokens, start + self._catalog.page_size)
        if tracked.page is None or not states or not known or not self._catalog.anchors.slots:
            return None
        ids = token_bytes(list(tracked.request.all_token_ids[start:position]))
        provenance = tracked.behind._replace(lossy=tracked.behind.lossy or self._lossy)
        # The page may be on its way itself. It is not pinned for the anchor: should it fail, the anchor goes with it.
        anchor = self._catalog.anchors.offer(tracked.page, ids, provenance)
        if anchor is None:
            return None
        self._tag += 1
        self._saves[self._tag] = anchor
        return Save(self._tag, anchor.slot, dict(states))

    def ended(self, saved: Mapping[int, tuple[int, int]]) -> None:
        """Take ranks' reports: tag -> how many ended a save, and how many of these failed."""
        for tag, (count, failures) in saved.items():
            before = self._ended.pop(tag, (0, 0))
            count, failures = count + before[0], failures + before[1]
            if count < self._ranks:
                self._ended[tag] = count, failures  # others still write into its slot
                continue
            anchor = self._saves.pop(tag)
            if failures:
                self._catalog.anchors.abort(anchor)
            else:
                self._catalog.anchors.commit(anchor)


def warn_of_chunks(interval: int, longest: int) -> None:
    """Say so if vLLM's chunks, of `longest` tokens at most, are longer than what is to lie between anchors."""
    if 0 < interval < longest:
        log.warning(
            "Saved states may lie up to %d tokens apart, not %d: they are saved where vLLM ends a chunk. Start with "
            "--max-num-batched-tokens %d for chunks that short.",
            longest,
            interval,
            interval,
        )
