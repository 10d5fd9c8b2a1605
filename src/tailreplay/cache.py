"""The prefix cache: the catalog decides; the host arena and the tiers below it execute."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tailreplay import writing
from tailreplay.cache_stats import CacheStats
from tailreplay.catalog import Catalog, check_page_size
from tailreplay.chain import Chain
from tailreplay.costs import CostModel
from tailreplay.decisions import Admission, Match
from tailreplay.errors import CacheConfigError
from tailreplay.keys import TOKEN_BYTES, Namespace, TokenIds, token_bytes
from tailreplay.modes import Reuse
from tailreplay.plan import ReplayPlan, make_plan
from tailreplay.provenance import Provenance
from tailreplay.sizes import parse_bytes
from tailreplay.storage import Storage
from tailreplay.topology import Topology
from tailreplay.views import PagesView

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from tailreplay.pages import PageLayout
    from tailreplay.tiers.anchor_arena import AnchorArena
    from tailreplay.tiers.base import Usage
    from tailreplay.tiers.host import HostArena
    from tailreplay.tiers.lower import LowerTiers

_RELEASED = "This plan was released (or made by another cache): its pages may be gone."
# A second time if less came than was found: then other hiddens are needed.
_LOOKS_BELOW = 2
_UNBOUND = "The cache has no page layout yet: attach a model first (HybridLM does) or call bind()."


class PrefixCache:
    """Cached prefixes of one model layout, in host memory under a hard byte limit and in tiers below it. Thread-safe.

    Parameters
    ----------
    host_bytes : int or str
        Limit of the arena, allocated at the first `bind`: ``"8GiB"``.
    page_size : int
        Tokens a page; any multiple of 16.
    min_match : int
        A shorter match is a miss.
    storage : Storage, optional
        Tiers below host memory, codecs, eviction policy and quotas; plain host memory if not given.

    Raises
    ------
    CacheConfigError
        If a size is not valid.
    """

    def __init__(
        self,
        host_bytes: int | str = "4GiB",
        page_size: int = 64,
        min_match: int = 1,
        storage: Storage | None = None,
    ) -> None:
        self.host_bytes = parse_bytes(host_bytes)
        check_page_size(page_size)
        self.page_size = page_size
        self.min_match = min_match
        self.storage = storage if storage is not None else Storage()
        self._lock = threading.Lock()
        self._catalog: Catalog | None = None
        self._arena: HostArena | None = None
        self._anchors: AnchorArena | None = None
        self._lower: LowerTiers | None = None
        self._damaged = 0
        self._leases: dict[int, ReplayPlan] = {}
        self._refused: Counter[str] = Counter()

    def bind(self, layout: PageLayout, pin: bool = False, label: str = "") -> None:
        """Allocate the arena for `layout` and open the tiers below; a second call with the same layout does nothing.

        Parameters
        ----------
        pin : bool
            Use page-locked memory (when the model is on a CUDA device).
        label : str
            Name of the model for people who look at the stored pages.

        Raises
        ------
        CacheConfigError
            If the cache holds another layout, or less than a page fits.
        """
        from tailreplay.tiers.anchor_arena import AnchorArena
        from tailreplay.tiers.host import HostArena

        with self._lock:
            if self._arena is not None:
                if self._arena.layout.digest != layout.digest:
                    raise CacheConfigError(
                        "This cache holds pages of a model with another layout: give each its own PrefixCache."
                    )
                return
            if layout.page_size != self.page_size:
                raise CacheConfigError(
                    f"Pages of {layout.page_size} tokens do not fit a cache of {self.page_size} a page."
                )
            storage = self.storage
            layout = layout.with_codecs(storage.host_codec, storage.host_kv_codec, storage.anchor_codec)
            catalog = storage.catalog(
                self.page_size,
                self.host_bytes,
                layout.page_bytes,
                layout.hidden_bytes,
                anchor_bytes=layout.anchor_bytes,
            )
            arena = HostArena(layout, catalog.slots, catalog.hidden_slots, pin)
            self._anchors = AnchorArena(layout.anchor, catalog.anchors.slots, pin)
            self._lower = storage.lower_tiers(catalog, arena, self._lock, label)
            self._arena, self._catalog = arena, catalog

    def lookup(
        self,
        tokens: TokenIds,
        namespace: Namespace,
        reuse: Reuse,
        topology: Topology,
        costs: CostModel | None = None,
    ) -> ReplayPlan:
        """Plan what to reuse for the prompt `tokens`, and pin its pages until `release`.

        Raises
        ------
        InvalidRequestError
            If a token id is not valid.
        """
        ids = token_bytes(tokens)
        plan = self._plan(ids, namespace, reuse, topology, costs)
        try:
            for _ in range(_LOOKS_BELOW):
                if self._lower is None or not _may_be_longer(plan, reuse):
                    break
                # Nothing of it may be evicted while more is brought up: it stays pinned until the longer one is.
                came, complete = self._lower.promote(ids, namespace, reuse, topology, plan.tokens - 1)
                if came:
                    plan = self._again(plan, ids, namespace, reuse, topology, costs)
                if not came or complete:
                    break
            while self._condemn_damaged(plan):
                plan = self._again(plan, ids, namespace, reuse, topology, costs)
        except BaseException:
            self.release(plan)
            raise
        return plan

    def prefetch(self, tokens: TokenIds, namespace: Namespace, reuse: Reuse, topology: Topology) -> int:
        """Bring a prompt's pages up from lower tiers before it is looked up. Returns how many came; blocks until then."""
        ids = token_bytes(tokens)
        if self._lower is None or reuse.mode == "off" or len(ids) < 2 * TOKEN_BYTES:
            return 0
        return self._lower.promote(ids, namespace, reuse, topology, len(ids) // TOKEN_BYTES - 1)[0]

    def fetch(self, plan: ReplayPlan) -> PagesView:
        """Return a reader of the plan's pages, valid until `release`."""
        if id(plan) not in self._leases or self._arena is None:
            raise RuntimeError(_RELEASED)
        return PagesView(self._arena, plan, self._anchors)

    def release(self, plan: ReplayPlan) -> None:
        """Unpin the plan's pages. A second call does nothing."""
        with self._lock:
            if self._leases.pop(id(plan), None) is not None:
                self._tree.unpin(plan.pages)
                self._tree.anchors.unpin(plan.anchor)

    def open(self, namespace: Namespace, plan: ReplayPlan | None = None) -> Chain:
        """Begin to store a sequence after the plan's last full page (or from its first token); ends with `close`."""
        full = plan.matched // self.page_size if plan is not None else 0
        with self._lock:
            if plan is not None and plan.pages and id(plan) not in self._leases:
                raise RuntimeError(_RELEASED)
            page = plan.pages[full - 1] if plan is not None and full else self._tree.root(namespace)
            self._tree.pin((page,))
            return Chain(namespace, page, full * self.page_size)

    def insert(
        self,
        chain: Chain,
        tokens: TokenIds,
        kv: Sequence[tuple[torch.Tensor, torch.Tensor]],
        hidden: Sequence[torch.Tensor],
        provenance: Provenance,
        gates: Sequence[NDArray[Any]] | None = None,
    ) -> int:
        """Store the next tokens of a sequence and let later requests match them. Returns how many were stored.

        An error, of any kind, leaves nothing of these tokens behind and ends the chain.

        Parameters
        ----------
        chain : Chain
            Advanced by the call. A run whose last page is partial ends it.
        tokens : sequence of int
            The n token ids that follow ``chain.tokens``.
        kv : sequence of (torch.Tensor, torch.Tensor)
            Keys and values by attention layer, shapes ``(n, kv_heads, head_dim)``.
        hidden : sequence of torch.Tensor
            Hiddens by stored group, shapes ``(n, d_model)``.
        provenance : Provenance
            Of all these tokens.
        gates : sequence of ndarray, optional
            What the tokens of each page forget (see `tailreplay.page.Page.gates`), for budgets that ask.

        Raises
        ------
        ValueError
            If a tensor is missing or has another shape or dtype than the layout says.
        """
        arena = self._arena
        if arena is None:
            raise RuntimeError(_UNBOUND)
        if chain.stopped or not len(tokens):
            return 0
        admitted: list[Admission] = []
        try:
            ids = token_bytes(tokens)
            flat = [tensor for pair in kv for tensor in pair]
            for part, tensor in zip(arena.layout.parts, [*flat, *hidden], strict=True):
                part.check(tensor, len(tokens))
            with self._lock:
                provenance = provenance._replace(lossy=provenance.lossy or arena.layout.lossy)
                admitted = writing.admit(self._tree, chain, ids, provenance, bool(hidden))
                if chain.stopped:
                    self._refused[chain.stopped] += 1
            writing.fill(arena, admitted, flat, hidden)
        except BaseException:
            with self._lock:
                writing.abort(self._tree, admitted)
                chain.stopped = "failed"
                self._refused["failed"] += 1
            raise
        with self._lock:
            stored = writing.commit(self._tree, chain, admitted, gates)
            if self._lower is not None:
                for admission in admitted:
                    if admission.fill is not None and admission.page is not None:
                        self._lower.spill(admission.page, chain.namespace)
            return stored

    @property
    def saves_states(self) -> bool:
        """Whether there is room for anchors."""
        return self._catalog is not None and self._catalog.anchors.slots > 0

    def save_states(
        self, chain: Chain, tokens: TokenIds, states: Sequence[torch.Tensor], provenance: Provenance
    ) -> bool:
        """Keep the states of a sequence as an anchor, for replays that begin there. Returns whether they are stored.

        They are not if no worse ones are there already, if there is no room, or if the chain has stopped.

        Parameters
        ----------
        chain : Chain
            Not changed.
        tokens : sequence of int
            The ids that follow ``chain.tokens``, up to the token after which the states are; at most a page of them.
        states : sequence of torch.Tensor
            One for each part of the layout's `anchor`.
        provenance : Provenance
            Of the states.
        """
        arena = self._anchors
        if arena is None:
            raise RuntimeError(_UNBOUND)
        if chain.stopped:
            return False
        with self._lock:
            lossy = provenance.lossy or any(part.lossy for part in arena.parts)
            anchor = self._tree.anchors.offer(chain.page, token_bytes(tokens), provenance._replace(lossy=lossy))
        if anchor is None:
            return False
        try:
            arena.write(anchor.slot, states)
        except BaseException:
            with self._lock:
                self._tree.anchors.abort(anchor)
            raise
        with self._lock:
            self._tree.anchors.commit(anchor)
        return True

    def fork(self, chain: Chain) -> Chain:
        """Return a second chain that goes on from where `chain` is; closed on its own."""
        with self._lock:
            if chain.stopped != "ended":
                self._tree.pin((chain.page,))
            return Chain(chain.namespace, chain.page, chain.tokens, chain.stopped)

    def close(self, chain: Chain) -> None:
        """End a sequence: its last page may be evicted from now on. A second call does nothing."""
        with self._lock:
            if chain.stopped != "ended":
                chain.stopped = "ended"
                self._tree.unpin((chain.page,))

    def flush(self, seconds: float = 60.0) -> bool:
        """Wait until all that is stored is in the tiers below, too. False if that takes longer than `seconds`."""
        return self._lower is None or self._lower.flush(seconds)

    def usage(self) -> dict[str, Usage]:
        """Return what each tier below holds, as far as it answers."""
        return self._lower.usage() if self._lower is not None else {}

    def shutdown(self) -> None:
        """Write what still waits to be written and let go of the tiers. A second call does nothing."""
        if self._lower is not None:
            self._lower.close()

    def clear(self) -> None:
        """Drop every page in host memory that is not in use; tiers below keep theirs."""
        with self._lock:
            if self._catalog is not None:
                self._catalog.clear()

    def stats(self) -> CacheStats:
        """Return a snapshot."""
        with self._lock:
            tree = self._catalog
            if tree is None:
                return CacheStats(0, 0, 0, self.host_bytes, 0)
            return CacheStats(
                tree.pages,
                tree.pinned,
                tree.bytes_used + self._anchor_bytes(tree.anchors.used),
                self.host_bytes,
                tree.evictions,
                dict(self._refused),
                tree.stripped,
                self._damaged,
                tree.slots * self.page_size,
                self._lower.counts() if self._lower is not None else {},
                tree.anchors.used,
                tree.anchors.slots,
                tree.anchors.evicted,
            )

    def _anchor_bytes(self, count: int) -> int:
        return count * sum(part.token_bytes for part in self._anchors.parts) if self._anchors is not None else 0

    @property
    def _tree(self) -> Catalog:
        if self._catalog is None:
            raise RuntimeError(_UNBOUND)
        return self._catalog

    def _plan(
        self, ids: bytes, namespace: Namespace, reuse: Reuse, topology: Topology, costs: CostModel | None
    ) -> ReplayPlan:
        """Plan from what host memory holds, and pin it."""
        count = len(ids) // TOKEN_BYTES
        with self._lock:
            match = Match(0, (), "end")
            if reuse.mode != "off":
                match = self._tree.match(ids, namespace, limit=count - 1, terms=reuse.terms)
            plan = make_plan(match, count, reuse, topology, min_match=self.min_match, costs=costs)
            self._tree.pin(plan.pages, plan.tail_start)
            self._tree.anchors.pin(plan.anchor)
            self._leases[id(plan)] = plan
            return plan

    def _again(
        self,
        plan: ReplayPlan,
        ids: bytes,
        namespace: Namespace,
        reuse: Reuse,
        topology: Topology,
        costs: CostModel | None,
    ) -> ReplayPlan:
        """Plan once more, now that there is more, or less, in host memory."""
        better = self._plan(ids, namespace, reuse, topology, costs)
        self.release(plan)
        return better

    def _condemn_damaged(self, plan: ReplayPlan) -> bool:
        """Let pages and the anchor of `plan` not be matched again if they are not what was stored. Whether any is not."""
        arena, anchor = self._arena, plan.anchor
        if arena is None or not plan.pages:
            return False
        lost = anchor is not None and self._anchors is not None and self._anchors.is_damaged(anchor.slot)
        # What is stored after a hit that ends inside a page takes that page's hiddens along, replayed or not.
        first = min(plan.tail_start, plan.matched // self.page_size * self.page_size)
        tail = [page for page in plan.pages if page.has_hidden and page.start + page.tokens > first]
        wrong = {page for page in plan.pages if arena.is_damaged(arena.layout.kv_parts, page.slot)}
        wrong |= {page for page in tail if arena.is_damaged(arena.layout.hidden, page.hidden_slot)}
        with self._lock:
            self._damaged += len(wrong)
            for page in wrong:
                self._tree.condemn(page)
            if lost and anchor is not None:
                self._damaged += 1
                self._tree.anchors.drop(anchor)
        return bool(wrong) or lost


def _may_be_longer(plan: ReplayPlan, reuse: Reuse) -> bool:
    """Whether tiers below host memory may have more of a prompt, or hiddens that a longer hit needs."""
    return reuse.mode != "off" and plan.tokens > 1 and (plan.matched < plan.tokens - 1 or plan.short_tail)
