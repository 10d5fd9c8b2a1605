"""What a request will reuse: asked of the catalog, of requests that are just storing it, and of the tiers below."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from tailreplay.catalog import Catalog
from tailreplay.decisions import Match
from tailreplay.engines.vllm.compat import Geometry
from tailreplay.engines.vllm.lower import LowerSide
from tailreplay.engines.vllm.namespaces import meets_images
from tailreplay.engines.vllm.settings import Settings
from tailreplay.engines.vllm.tracked import Tracked
from tailreplay.engines.vllm.waiting import still_waits, writer_of
from tailreplay.keys import token_bytes
from tailreplay.mean_states import TOKENS
from tailreplay.plan import ReplayPlan, make_plan, with_engines_own, without_reuse


class Lookup:
    """Makes plans. Pins nothing.

    Parameters
    ----------
    lower : LowerSide or None
        Tiers below host memory.

    Attributes
    ----------
    has_mean : bool
        Whether tails may begin with the model's mean state.
    """

    def __init__(self, catalog: Catalog, settings: Settings, geometry: Geometry, lower: LowerSide | None) -> None:
        self._catalog = catalog
        self._settings = settings
        self._topology = geometry.whole
        self._page_size = geometry.page_size
        self._lower = lower
        self.has_mean = False

    def begin(self, tracked: Tracked) -> None:
        """Begin to bring up what lower tiers hold of a request's prompt, while earlier requests are still running."""
        if self._lower is not None:
            self._lower.begin(tracked, tracked.expected, self._match(tracked, tracked.expected))

    def plan(self, tracked: Tracked, computed: int, others: Iterable[Tracked]) -> ReplayPlan | None:
        """Return a request's plan; None to be asked again: more of its prefix is just being computed, or brought up.

        Parameters
        ----------
        computed : int
            Tokens that vLLM's own prefix cache has.
        others : iterable of Tracked
            Requests that may be storing this one's prefix.
        """
        request, reuse = tracked.request, tracked.options.reuse
        if still_waits(tracked, self._settings.prefix_wait):
            return None
        # Asked in every step while it waits: a prompt is encoded once. After a preemption there are more tokens than it.
        is_prompt = request.num_tokens == request.num_prompt_tokens
        ids = tracked.expected if is_prompt else token_bytes(list(request.all_token_ids))
        found = self._match(tracked, ids)
        if reuse.mode != "off":
            if self._is_being_stored(tracked, ids, found.tokens, others):
                return None
            if self._lower is not None and self._lower.waits(tracked, ids, found):
                return None
        reuse = replace(reuse, mean=self.has_mean)
        plan = make_plan(found, request.num_tokens, reuse, self._topology, min_match=self._settings.min_match)
        if meets_images(request, plan, self._topology):
            plan = without_reuse(plan, "image_in_tail")
        if computed and plan.matched - computed <= plan.replayed:
            # vLLM's own exact state lies so near that computing the rest costs no more than replaying.
            plan = with_engines_own(plan, computed, self._page_size)
        return plan

    def _match(self, tracked: Tracked, ids: bytes) -> Match:
        request: Any = tracked.request
        options = tracked.options
        limit = min(request.num_tokens - 1, TOKENS) if options.calibrates else request.num_tokens - 1
        return self._catalog.match(ids, tracked.namespace, limit=limit, terms=options.reuse.terms)

    def _is_being_stored(self, tracked: Tracked, ids: bytes, matched: int, others: Iterable[Tracked]) -> bool:
        """Whether another request is just computing much more of this one's prefix than is matched yet."""
        if time.monotonic() - tracked.first_asked > self._settings.prefix_wait:
            return False
        other = writer_of(tracked, others, ids, matched, self._settings.min_match)
        tracked.waits_for = None if other is None else (other, other.stored, other.puts)
        return other is not None
