"""A tiny page layout, and tensors that say which prefix they belong to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tailreplay.cache import PrefixCache
from tailreplay.keys import Namespace
from tailreplay.modes import Reuse, parse_reuse
from tailreplay.pages import PageLayout, PartSpec
from tailreplay.plan import ReplayPlan
from tailreplay.provenance import EXACT, Provenance
from tailreplay.topology import Topology
from tailreplay.views import PagesView

PAGE = 16
TOPOLOGY = Topology.from_layer_types(["linear_attention", "full_attention", "linear_attention"])
LAYOUT = PageLayout(
    PAGE,
    kv=((PartSpec("k1", (1, 2), torch.float32), PartSpec("v1", (1, 2), torch.float32)),),
    hidden=(PartSpec("h1", (3,), torch.float32),),
)
NAMESPACE = Namespace("model", LAYOUT.digest, PAGE)
REPLAY = parse_reuse("replay")
EXACTLY = parse_reuse("exact")

KV = list[tuple[torch.Tensor, torch.Tensor]]


def contents(tokens: Sequence[int], start: int, depth: int = 0) -> tuple[KV, list[torch.Tensor]]:
    """Keys, values and hiddens of tokens from `start` on: a function of all tokens up to each, and of `depth`."""
    marks, mark = [], 1
    for token in tokens:
        mark = (mark * 31 + token + 7) % 99_991
        marks.append(mark)
    base = torch.tensor(marks[start:], dtype=torch.float32) + 100_000.0 * depth
    keys = torch.stack([base, base + 1], dim=1)[:, None]
    values = torch.stack([base + 2, base + 3], dim=1)[:, None]
    return [(keys, values)], [torch.stack([base + 4, base + 5, base + 6], dim=1)]


def make_cache(pages: int, min_match: int = 1) -> PrefixCache:
    """Return a bound cache that holds `pages` pages."""
    cache = PrefixCache(pages * LAYOUT.page_bytes, page_size=PAGE, min_match=min_match)
    cache.bind(LAYOUT)
    return cache


def look_up(
    cache: PrefixCache, tokens: Sequence[int], reuse: Reuse = REPLAY, namespace: Namespace = NAMESPACE
) -> ReplayPlan:
    return cache.lookup(list(tokens), namespace, reuse, TOPOLOGY)


def store(
    cache: PrefixCache,
    tokens: Sequence[int],
    plan: ReplayPlan | None = None,
    provenance: Provenance = EXACT,
    namespace: Namespace = NAMESPACE,
) -> int:
    """Store a sequence (what `plan` does not hold of it) and return how many tokens were stored."""
    chain = cache.open(namespace, plan)
    start = chain.tokens
    try:
        return cache.insert(chain, tokens[start:], *contents(tokens, start, provenance.depth), provenance)
    finally:
        cache.close(chain)


def matched(cache: PrefixCache, tokens: Sequence[int], reuse: Reuse = REPLAY, namespace: Namespace = NAMESPACE) -> int:
    """Length of the match of `tokens`, released at once."""
    plan = look_up(cache, tokens, reuse, namespace)
    cache.release(plan)
    return plan.matched


def assert_contents(view: PagesView, plan: ReplayPlan, tokens: Sequence[int]) -> None:
    """Check every number behind `plan` against what was stored with pages of that provenance."""
    m = plan.matched
    keys, values, hidden = torch.empty(m, 1, 2), torch.empty(m, 1, 2), torch.empty(m, 3)
    view.keys_values(0, keys, values)
    view.hidden(0, 0, m, hidden)
    for index, page in enumerate(plan.pages):
        span = slice(index * PAGE, min(m, (index + 1) * PAGE))
        [(k, v)], [h] = contents(tokens[: span.stop], span.start, page.provenance.depth)
        for got, want in ((keys, k), (values, v), (hidden, h)):
            torch.testing.assert_close(got[span], want, rtol=0, atol=0)
