"""A trace through a catalog: what is hit, and what that saves. No tensors."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from tailreplay import writing
from tailreplay.bench.eviction_future import Clairvoyant
from tailreplay.bench.traces import Request
from tailreplay.catalog import Catalog
from tailreplay.chain import Chain
from tailreplay.costs import CostModel
from tailreplay.keys import TOKEN_BYTES, Namespace, token_bytes
from tailreplay.modes import Reuse
from tailreplay.page import Page
from tailreplay.plan import ReplayPlan, make_plan


@dataclass
class Outcome:
    """Sums over a trace.

    Attributes
    ----------
    matched : array of int
        Tokens that each request hit.
    full_flops, saved_flops : float
        Operations of all prompts without a cache, and those that hits saved, replay taken off.
    short_tails : int
        Hits that replay a shorter tail than asked for, since hiddens are gone.
    cut : int
        Hits that are shorter than what was resident, for the same reason.
    no_hiddens : int
        Misses for the same reason.
    full : int
        Requests of which not all was stored for want of room.
    most_bytes : int
        Highest number of bytes in use after any request.
    """

    matched: array[int] = field(default_factory=lambda: array("q"))
    prompt_tokens: int = 0
    full_flops: float = 0.0
    saved_flops: float = 0.0
    short_tails: int = 0
    cut: int = 0
    no_hiddens: int = 0
    full: int = 0
    most_bytes: int = 0

    @property
    def hit_tokens(self) -> int:
        """Tokens of prompts that were not computed."""
        return sum(self.matched)

    def add(self, plan: ReplayPlan, costs: CostModel) -> None:
        """Count one request."""
        self.matched.append(plan.matched)
        self.prompt_tokens += plan.tokens
        self.full_flops += costs.prefill_flops(0, plan.tokens)
        if plan.estimate is not None:
            self.saved_flops += plan.estimate.full_flops - plan.estimate.hit_flops
        self.short_tails += plan.short_tail
        self.cut += plan.matched > 0 and plan.stop == "no_hiddens"
        self.no_hiddens += plan.miss_reason == "no_hiddens"


class Replayer:
    """Does for each request what `tailreplay.cache.PrefixCache` does, one request after the other.

    Parameters
    ----------
    oracle : Clairvoyant, optional
        The catalog's policy, if it wants to know of uses.
    """

    def __init__(self, catalog: Catalog, reuse: Reuse, costs: CostModel, oracle: Clairvoyant | None = None) -> None:
        self.catalog = catalog
        self.outcome = Outcome()
        self._reuse, self._costs, self._oracle = reuse, costs, oracle
        self._namespaces: dict[str, Namespace] = {}

    def run(self, trace: Iterable[Request]) -> Outcome:
        """Replay a whole trace."""
        for request in trace:
            self.serve(request)
        return self.outcome

    def serve(self, request: Request) -> ReplayPlan:
        """Look a prompt up, then store it with its answer. Mutates the catalog; all pins are given back."""
        plan, ids = self.look_up(request)
        pages = self.store(request, plan, ids)
        if self._oracle is not None:
            whole = (page for page in plan.pages if page.start + page.tokens <= plan.matched)
            self._oracle.used(len(self.outcome.matched) - 1, whole, pages)
        self.catalog.unpin(pages)
        self.catalog.unpin(plan.pages)
        self.outcome.most_bytes = max(self.outcome.most_bytes, self.catalog.bytes_used)
        return plan

    def look_up(self, request: Request) -> tuple[ReplayPlan, bytes]:
        """Plan a request and pin its pages; returns the encoded prompt, too."""
        ids, tokens = token_bytes(request.prompt), len(request.prompt)
        match = self.catalog.match(ids, self.namespace(request), limit=tokens - 1)
        plan = make_plan(match, tokens, self._reuse, self._costs.topology, costs=self._costs)
        self.catalog.pin(plan.pages, plan.tail_start)
        self.outcome.add(plan, self._costs)
        return plan, ids

    def store(self, request: Request, plan: ReplayPlan, ids: bytes) -> list[Page]:
        """Store what follows the plan's last full page; returns those pages, pinned."""
        size = self.catalog.page_size
        full = plan.matched // size
        page = plan.pages[full - 1] if full else self.catalog.root(self.namespace(request))
        chain = Chain(self.namespace(request), page, full * size)
        self.catalog.pin((page,))
        rest = (ids + token_bytes(request.output))[full * size * TOKEN_BYTES :]
        admitted = writing.admit(self.catalog, chain, rest, plan.provenance, True)
        pages = [admission.page for admission in admitted if admission.page is not None]
        self.catalog.pin(pages, chain.tokens + len(rest))
        writing.commit(self.catalog, chain, admitted)
        self.catalog.unpin((chain.page,))
        self.outcome.full += chain.stopped == "full"
        return pages

    def namespace(self, request: Request) -> Namespace:
        """Return the namespace of a request's tenant."""
        if request.tenant not in self._namespaces:
            self._namespaces[request.tenant] = Namespace("bench", "none", self.catalog.page_size, request.tenant)
        return self._namespaces[request.tenant]
