"""The prefix cache: the catalog decides, the host arena executes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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
from tailreplay.topology import Topology
from tailreplay.views import PagesView

if TYPE_CHECKING:
    import torch

    from tailreplay.pages import PageLayout
    from tailreplay.tiers.host import HostArena

_RELEASED = "This plan was released (or made by another cache): its pages may be gone."
_UNBOUND = "The cache has no page layout yet: attach a model first (HybridLM does) or call bind()."


@dataclass(frozen=True)
class CacheStats:
    """A snapshot of the cache. Bytes and pages now; evictions and refusals since the start."""

    pages: int
    pinned: int
    bytes_used: int
    bytes_limit: int
    evictions: int
    refused: dict[str, int] = field(default_factory=dict)


class PrefixCache:
    """Cached prefixes of one model layout, in host memory under a hard byte limit. Thread-safe.

    Parameters
    ----------
    host_bytes : int or str
        Limit of the arena, allocated at the first `bind`: ``"8GiB"``.
    page_size : int
        Tokens a page; any multiple of 16.
    min_match : int
        A shorter match is a miss.

    Raises
    ------
    CacheConfigError
        If a size is not valid.
    """

    def __init__(self, host_bytes: int | str = "4GiB", page_size: int = 64, min_match: int = 1) -> None:
        self.host_bytes = parse_bytes(host_bytes)
        check_page_size(page_size)
        self.page_size = page_size
        self.min_match = min_match
        self._lock = threading.Lock()
        self._catalog: Catalog | None = None
        self._arena: HostArena | None = None
        self._leases: dict[int, ReplayPlan] = {}
        self._refused: Counter[str] = Counter()

    def bind(self, layout: PageLayout, pin: bool = False) -> None:
        """Allocate the arena for `layout`; a second call with the same layout does nothing.

        Parameters
        ----------
        pin : bool
            Use page-locked memory (when the model is on a CUDA device).

        Raises
        ------
        CacheConfigError
            If the cache holds another layout, or less than a page fits.
        """
        from tailreplay.tiers.host import HostArena

        with self._lock:
            if self._arena is not None:
                if self._arena.layout != layout:
                    raise CacheConfigError(
                        "This cache holds pages of a model with another layout: give each its own PrefixCache."
                    )
                return
            if layout.page_size != self.page_size:
                raise CacheConfigError(
                    f"Pages of {layout.page_size} tokens do not fit a cache of {self.page_size} a page."
                )
            catalog = Catalog(self.page_size, self.host_bytes, layout.page_bytes)
            self._arena = HostArena(layout, catalog.slots, pin)
            self._catalog = catalog

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
        count = len(ids) // TOKEN_BYTES
        with self._lock:
            match = Match(0, (), "end")
            if reuse.mode != "off":
                match = self._tree.match(ids, namespace, limit=count - 1, exact_only=reuse.mode == "exact")
            plan = make_plan(match, count, reuse, topology, min_match=self.min_match, costs=costs)
            self._tree.pin(plan.pages)
            self._leases[id(plan)] = plan
            return plan

    def fetch(self, plan: ReplayPlan) -> PagesView:
        """Return a reader of the plan's pages, valid until `release`."""
        if id(plan) not in self._leases or self._arena is None:
            raise RuntimeError(_RELEASED)
        return PagesView(self._arena, plan)

    def release(self, plan: ReplayPlan) -> None:
        """Unpin the plan's pages. A second call does nothing."""
        with self._lock:
            if self._leases.pop(id(plan), None) is not None:
                self._tree.unpin(plan.pages)

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
            columns = list(zip(arena.layout.parts, [*(tensor for pair in kv for tensor in pair), *hidden], strict=True))
            for part, tensor in columns:
                part.check(tensor, len(tokens))
            with self._lock:
                self._admit(chain, ids, provenance, admitted)
            for first, slots in _runs_to_fill(admitted):
                span = slice(first * self.page_size, min((first + len(slots)) * self.page_size, len(tokens)))
                for part, tensor in columns:
                    arena.write(part, slots, tensor[span])
        except BaseException:
            with self._lock:
                self._abort(admitted)
                chain.stopped = "failed"
                self._refused["failed"] += 1
            raise
        with self._lock:
            return self._commit(chain, admitted)

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

    def clear(self) -> None:
        """Drop every page that is not in use."""
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
                tree.pages, tree.pinned, tree.bytes_used, self.host_bytes, tree.evictions, dict(self._refused)
            )

    @property
    def _tree(self) -> Catalog:
        if self._catalog is None:
            raise RuntimeError(_UNBOUND)
        return self._catalog

    def _admit(self, chain: Chain, ids: bytes, provenance: Provenance, admitted: list[Admission]) -> None:
        """Append an admission a page to `admitted`, up to the first that is refused."""
        step = self.page_size * TOKEN_BYTES
        page = chain.page
        for at in range(0, len(ids), step):
            admission = self._tree.admit(page, chain.namespace, ids[at : at + step], provenance)
            if admission.page is None:
                chain.stopped = admission.reason
                self._refused[admission.reason] += 1
                break
            admitted.append(admission)
            page = admission.page

    def _abort(self, admitted: list[Admission]) -> None:
        for admission in reversed(admitted):
            if admission.fill is not None:
                self._tree.abort(admission.fill)
            elif admission.page is not None:
                self._tree.unpin((admission.page,))

    def _commit(self, chain: Chain, admitted: list[Admission]) -> int:
        stored = 0
        for admission in admitted:
            assert admission.page is not None
            if admission.fill is not None:
                self._tree.commit(admission.fill)
            self._tree.unpin((chain.page,))
            chain.page = admission.page
            stored += admission.page.tokens
        chain.tokens += stored
        if chain.tokens % self.page_size:
            chain.stopped = chain.stopped or "partial"
        return stored


def _runs_to_fill(admitted: list[Admission]) -> list[tuple[int, list[int]]]:
    """Join neighbouring pages that must be written: (index of the first, slots)."""
    runs: list[tuple[int, list[int]]] = []
    for index, admission in enumerate(admitted):
        if admission.fill is None:
            continue
        if runs and runs[-1][0] + len(runs[-1][1]) == index:
            runs[-1][1].append(admission.fill.slot)
        else:
            runs.append((index, [admission.fill.slot]))
    return runs
