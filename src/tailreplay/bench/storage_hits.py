"""How long a hit takes by where its pages are, and how fast they come, beside what the machine does without a cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch

from tailreplay.bench.page_shapes import PAGE_SHAPES, PageShape
from tailreplay.bench.timed_tier import TimedTier
from tailreplay.cache import PrefixCache
from tailreplay.errors import TailReplayError
from tailreplay.keys import Namespace
from tailreplay.modes import Reuse, parse_reuse
from tailreplay.pages import PageLayout
from tailreplay.plan import ReplayPlan
from tailreplay.provenance import EXACT
from tailreplay.storage import Storage
from tailreplay.tiers.base import PARTS
from tailreplay.tiers.batches import by_count
from tailreplay.tiers.factory import folder_of, open_tier

# A machine that others use, too, is not to turn a slow answer into a miss: what is slow is to be seen as slow.
_DEADLINE = 10.0
PAGE_SIZE = 64


class Hits:
    """One stored prompt, in host memory and in the tier behind it, and tensors for what is read of it.

    Parameters
    ----------
    shape : PageShape
        Of the pages.
    tokens : int
        Length of the prefix; a multiple of the page size.
    address : str
        Of a tier (see `tailreplay.tiers.factory.open_tier`); "" for none.
    hidden_codec : str
        In the tier.
    scattered : bool
        Whether no two pages that follow one another lie so in host memory.

    Raises
    ------
    TailReplayError
        If the tier does not take the pages.
    """

    def __init__(
        self,
        shape: PageShape,
        tokens: int,
        address: str = "",
        hidden_codec: str = "none",
        scattered: bool = False,
    ) -> None:
        self.layout = shape.layout(PAGE_SIZE)
        self.topology = shape.topology
        self.tier = TimedTier(lambda: open_tier(address, guarded=False)) if address else None
        tiers = (self.tier,) if self.tier is not None else ()
        storage = Storage(tiers=tiers, hidden_codec=hidden_codec, deadline=_DEADLINE)
        # Room for a page more than there is: nothing is evicted.
        pages = tokens // PAGE_SIZE * (2 if scattered else 1) + 1
        self.cache = PrefixCache(pages * self.layout.page_bytes, PAGE_SIZE, storage=storage)
        self.cache.bind(self.layout)
        # Other ones every time: what an earlier run left in a store is not found.
        self._namespace, self._other = (
            Namespace(f"bench {time.time_ns()} {i}", self.layout.digest, PAGE_SIZE) for i in range(2)
        )
        self.tokens = tokens
        self._prompt = [*range(1, tokens + 2)]
        self.kv, self.hidden = _contents(self.layout, tokens)
        # As many at a time as a tier's guard lets through.
        self._group = max(1, (4 << 20) * 2 // self.layout.page_bytes)
        step = PAGE_SIZE if scattered else tokens
        self._store(step, (self._namespace, self._other) if scattered else (self._namespace,))

    def look_up(self, reuse: Reuse) -> ReplayPlan:
        """Plan, and pin; raises if the hit is shorter than the prefix."""
        plan = self.cache.lookup(self._prompt, self._namespace, reuse, self.topology)
        if plan.matched != self.tokens:
            self.cache.release(plan)
            raise _lost(plan.matched, self.tokens, "tokens")
        return plan

    def prefetch(self, reuse: Reuse) -> None:
        """Bring all pages into host memory; raises if some are gone."""
        came = self.cache.prefetch(self._prompt, self._namespace, reuse, self.topology)
        if came != self.tokens // PAGE_SIZE:
            raise _lost(came, self.tokens // PAGE_SIZE, "pages")

    def read(self, plan: ReplayPlan) -> None:
        """Copy keys, values, and the hiddens of the tail into contiguous tensors."""
        view = self.cache.fetch(plan)
        for index, (keys, values) in enumerate(self.kv):
            view.keys_values(index, keys, values)
        tails = [k for k, group in zip(plan.tails, self.topology.groups, strict=True) if group.stores_hidden]
        for index, (out, tail) in enumerate(zip(self.hidden, tails, strict=True)):
            view.hidden(index, plan.matched - tail, plan.matched, out[:tail])

    def nbytes(self, plan: ReplayPlan) -> int:
        """Bytes that `read` copies."""
        tails = [k for k, group in zip(plan.tails, self.topology.groups, strict=True) if group.stores_hidden]
        sizes = self.layout.hidden_bytes_per_token
        hiddens = sum(tail * size for tail, size in zip(tails, sizes, strict=True))
        return plan.matched * self.layout.kv_bytes_per_token + hiddens

    def get(self, target: torch.Tensor) -> int:
        """Copy all parts from the tier itself into `target`, without the cache. Returns the bytes."""
        assert self.tier is not None
        at = 0
        for keys, part in product(by_count(self.tier.keys, self._group), PARTS):
            for view in self.tier.get(keys, part):
                if view is None:
                    raise TailReplayError("The store has lost a page.")
                target.numpy()[at : at + view.nbytes] = view
                at += view.nbytes
        return at

    def close(self) -> None:
        """Remove the pages from the tier, and let go of it."""
        if self.tier is not None:
            self.tier.drop(self.tier.keys)
        self.cache.shutdown()

    def _store(self, step: int, namespaces: Sequence[Namespace]) -> None:
        """Store the prefix under each of `namespaces`, in turns of `step` tokens."""
        chains = [self.cache.open(namespace) for namespace in namespaces]
        for at in range(0, self.tokens, step):
            kv = [(keys[at : at + step], values[at : at + step]) for keys, values in self.kv]
            hidden = [tensor[at : at + step] for tensor in self.hidden]
            for chain in chains:
                self.cache.insert(chain, self._prompt[at : min(at + step, self.tokens)], kv, hidden, EXACT)
        for chain in chains:
            self.cache.close(chain)
        if not self.cache.flush(120.0):
            raise TailReplayError("The store did not take the pages within two minutes.")


def latency_rows(
    shape: str, tokens: int, addresses: Sequence[str], repeats: int, hidden_codec: str = "int8", ratio: float = 0.05
) -> list[dict[str, Any]]:
    """Return what a hit that replays a share `ratio` of the prefix waits for, one row a place. Milliseconds, medians.

    ``lookup`` brings the pages into host memory, plans and pins them; of it ``find`` is what the tier took to say what it
    has, ``get`` what it took to hand the parts over, and ``rest`` everything else: checksums, copies into host memory,
    decoding, thread hand-offs. A part of a disk tier is read from the disk when its checksum is, so in ``rest``. ``read``
    copies from host memory into contiguous tensors.
    """
    reuse = parse_reuse("replay", ratio=ratio)
    rows = []
    for address in ("", *addresses):
        with opened(shape, tokens, address, hidden_codec if address else "none") as hits:
            rows.append(_latency(hits, reuse, repeats) | {"place": place_of(address)})
    return rows


def place_of(address: str) -> str:
    """Name the kind of tier behind an address."""
    if not address:
        return "host"
    return "disk" if folder_of(address) is not None else address.partition(":")[0]


@contextmanager
def opened(shape: str, tokens: int, address: str, hidden_codec: str = "none") -> Iterator[Hits]:
    hits = Hits(PAGE_SHAPES[shape], tokens, address, hidden_codec)
    try:
        yield hits
    finally:
        hits.close()


def _latency(hits: Hits, reuse: Reuse, repeats: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {name: [] for name in ("lookup", "find", "get", "rest", "read")}
    moved = 0
    for turn in range(1 + repeats):
        if hits.tier is not None:
            hits.cache.clear()
            hits.tier.reset()
        begin = time.perf_counter()
        plan = hits.look_up(reuse)
        between = time.perf_counter()
        hits.read(plan)
        end = time.perf_counter()
        read_bytes = hits.nbytes(plan)
        hits.cache.release(plan)
        find, get, moved = hits.tier.taken() if hits.tier is not None else (0.0, 0.0, 0)
        lookup = between - begin
        if turn:
            for name, seconds in zip(times, (lookup, find, get, lookup - find - get, end - between), strict=True):
                times[name].append(seconds)
    row: dict[str, Any] = {f"{name}_ms": 1000 * statistics.median(seconds) for name, seconds in times.items()}
    return row | {"moved": moved, "read_bytes": read_bytes, "replayed": plan.replayed, "tokens": hits.tokens}


def _lost(came: int, wanted: int, what: str) -> TailReplayError:
    return TailReplayError(f"Only {came} of {wanted} {what} were found again: the store is too small, or too slow.")


def _contents(layout: PageLayout, tokens: int) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[torch.Tensor]]:
    """Return tensors of noise that lossy codecs take."""

    # One tensor's worth of noise does for all of them: nothing here compresses.
    def noise(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        piece = torch.randn(PAGE_SIZE, *shape).to(dtype)
        return piece.repeat(tokens // PAGE_SIZE, *[1] * len(shape))

    kv = [(noise(k.shape, k.dtype), noise(v.shape, v.dtype)) for k, v in layout.kv]
    return kv, [noise(part.shape, part.dtype) for part in layout.hidden]
