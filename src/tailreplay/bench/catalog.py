"""How fast the catalog answers and what it costs in memory: branched sequences, long prompts, thousands of siblings."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from tailreplay.catalog import Catalog
from tailreplay.errors import InvalidRequestError
from tailreplay.keys import TOKEN_BYTES, Namespace, token_bytes
from tailreplay.modes import parse_reuse
from tailreplay.page import Page
from tailreplay.plan import ReplayPlan, make_plan
from tailreplay.provenance import EXACT
from tailreplay.topology import Topology

PAGE_SIZE = 64
LONG, SHORT = 128 * 1024, 4 * 1024
VOCABULARY = 150_000
INCLUDED = "token_bytes + Catalog.match + make_plan + Catalog.pin, from a list of ints; no lock, no copy of any page"
# Upper limits: the fields of `CatalogReport` that have one.
TARGETS = {"lookup_ms_128k": 10.0, "lookup_ms_4k": 0.5, "overhead_bytes_per_page": 1024.0}

_STEP = PAGE_SIZE * TOKEN_BYTES
_WARM_UP = 3
_NAMESPACE = Namespace("bench", "none", PAGE_SIZE)
_TOPOLOGY = Topology.from_layer_types((["linear_attention"] * 3 + ["full_attention"]) * 8)


@dataclass(frozen=True)
class CatalogReport:
    """What was measured. Times are medians in milliseconds.

    Attributes
    ----------
    cached_tokens, pages : int
        Resident when the lookups were timed.
    lookup_ms_128k, lookup_ms_4k : float
        Of a prompt that is cached as a whole.
    lookup_ms_siblings : float
        Of a prompt of one page that diverges inside it, among `siblings` pages with the same parent.
    overhead_bytes_per_page : float
        Python memory of the whole catalog a page, less the bytes of the token ids themselves.
    included : str
        What a lookup is made of.
    """

    cached_tokens: int
    sequences: int
    pages: int
    page_size: int
    siblings: int
    repeats: int
    lookup_ms_128k: float
    lookup_ms_4k: float
    lookup_ms_siblings: float
    overhead_bytes_per_page: float
    included: str = INCLUDED

    def met(self) -> dict[str, bool]:
        """Which of `TARGETS` are met."""
        return {name: getattr(self, name) < limit for name, limit in TARGETS.items()}


@dataclass(frozen=True)
class Branch:
    """A sequence of the workload: the first `shared` tokens of sequence `parent`, then `own` (encoded) ones."""

    parent: int | None
    shared: int
    own: bytes


def make_branches(tokens: int, sequences: int, seed: int) -> list[Branch]:
    """Return sequences with about `tokens` tokens of their own: two long prompts, then branches off earlier ones.

    Every other branch leaves its parent at a page border, the others anywhere; half of them leave a long prompt.
    """
    rest = tokens - LONG - SHORT
    if sequences < 3 or rest < sequences:
        raise InvalidRequestError(f"The bench needs 3 sequences and more than {LONG + SHORT + sequences} tokens.")
    rng = np.random.default_rng(seed)

    def fresh(count: int) -> bytes:
        return token_bytes(rng.integers(VOCABULARY, size=count))

    branches = [Branch(None, 0, fresh(LONG)), Branch(None, 0, fresh(SHORT))]
    lengths = [LONG, SHORT]
    for index in range(2, sequences):
        parent = int(rng.integers(index if rng.random() < 0.5 else 2))
        shared = int(rng.integers(1, lengths[parent]))
        if index % 2:
            shared -= shared % PAGE_SIZE
        own = rest * (index - 1) // (sequences - 2) - rest * (index - 2) // (sequences - 2)
        branches.append(Branch(parent, shared, fresh(own)))
        lengths.append(shared + own)
    return branches


def fill(branches: Sequence[Branch]) -> Catalog:
    """Return a catalog that holds every sequence of `branches`."""
    catalog = _roomy_catalog(sum(len(branch.own) for branch in branches) // _STEP + 2 * len(branches))
    chains: list[list[Page]] = []
    for branch in branches:
        chain: list[Page] = []
        ids = branch.own
        if branch.parent is not None:
            full, inside = divmod(branch.shared, PAGE_SIZE)
            above = chains[branch.parent]
            chain = above[:full]
            ids = (above[full].ids[: inside * TOKEN_BYTES] if inside else b"") + ids
        chains.append(chain + _store(catalog, chain[-1] if chain else catalog.root(_NAMESPACE), ids))
    return catalog


def measure(tokens: int, sequences: int, siblings: int, repeats: int, seed: int) -> CatalogReport:
    """Fill a catalog and measure it.

    Raises
    ------
    InvalidRequestError
        If a number is too small for the two long prompts and a branch.
    """
    if siblings < 1 or repeats < 1 or seed < 0:
        raise InvalidRequestError("The bench needs at least one sibling and one repeat, and a seed of at least 0.")
    branches = make_branches(tokens, sequences, seed)
    # The branches exist already, so what is traced from here on is the catalog with its copies of the ids.
    gc.collect()
    tracemalloc.start()
    catalog = fill(branches)
    gc.collect()
    traced, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    pages = catalog.resident()
    id_bytes = sum(len(page.ids) for page in pages)
    return CatalogReport(
        cached_tokens=id_bytes // TOKEN_BYTES,
        sequences=sequences,
        pages=len(pages),
        page_size=PAGE_SIZE,
        siblings=siblings,
        repeats=repeats,
        lookup_ms_128k=_time_lookup(catalog, branches[0].own, LONG - 1, repeats),
        lookup_ms_4k=_time_lookup(catalog, branches[1].own, SHORT - 1, repeats),
        lookup_ms_siblings=_time_siblings(siblings, repeats, seed),
        overhead_bytes_per_page=(traced - id_bytes) / len(pages),
    )


def _time_siblings(siblings: int, repeats: int, seed: int) -> float:
    """Time a prompt that shares half a page with one of `siblings` children, and no more with any other."""
    catalog = _roomy_catalog(siblings)
    rows = np.random.default_rng(seed).integers(VOCABULARY, size=(siblings, PAGE_SIZE))
    rows[:, 0] = np.arange(siblings)
    for row in rows:
        _store(catalog, catalog.root(_NAMESPACE), token_bytes(row))
    prompt = rows[siblings // 2].copy()
    prompt[PAGE_SIZE // 2 :] = VOCABULARY
    return _time_lookup(catalog, token_bytes(prompt), PAGE_SIZE // 2, repeats)


def _time_lookup(catalog: Catalog, ids: bytes, expected: int, repeats: int) -> float:
    """Return the median milliseconds of looking `ids` up, checking that `expected` tokens match."""
    prompt: list[int] = np.frombuffer(ids, dtype=">u4").tolist()
    reuse = parse_reuse("replay")

    def lookup() -> ReplayPlan:
        match = catalog.match(token_bytes(prompt), _NAMESPACE, limit=len(prompt) - 1)
        plan = make_plan(match, len(prompt), reuse, _TOPOLOGY)
        catalog.pin(plan.pages)
        return plan

    def release(plan: ReplayPlan) -> None:
        assert plan.matched == expected, "the workload is not what it should be"
        catalog.unpin(plan.pages)

    return _median_ms(lookup, release, repeats)


def _median_ms(call: Callable[[], ReplayPlan], undo: Callable[[ReplayPlan], None], repeats: int) -> float:
    times = []
    for _ in range(_WARM_UP + repeats):
        begin = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - begin)
        undo(result)
    return statistics.median(times[_WARM_UP:]) * 1e3


def _roomy_catalog(slots: int) -> Catalog:
    return Catalog(PAGE_SIZE, limit_bytes=slots, page_bytes=1)


def _store(catalog: Catalog, page: Page, ids: bytes) -> list[Page]:
    """Store `ids` after `page` as the cache does, without bytes behind the pages. Returns the pages."""
    catalog.pin((page,))
    stored = []
    for at in range(0, len(ids), _STEP):
        admission = catalog.admit(page, _NAMESPACE, ids[at : at + _STEP], EXACT)
        assert admission.page is not None, admission.reason
        if admission.fill is not None:
            catalog.commit(admission.fill)
        catalog.unpin((page,))
        page = admission.page
        stored.append(page)
    catalog.unpin((page,))
    return stored


def render(report: CatalogReport) -> str:
    """Return a table for people."""
    met = report.met()
    rows = [
        ("lookup, prompt of 128K tokens", "lookup_ms_128k", "ms"),
        ("lookup, prompt of 4K tokens", "lookup_ms_4k", "ms"),
        (f"lookup among {report.siblings:,} siblings", "lookup_ms_siblings", "ms"),
        ("memory a page besides its ids", "overhead_bytes_per_page", "bytes"),
    ]
    lines = [
        f"{report.cached_tokens:,} tokens of {report.sequences:,} branched sequences in {report.pages:,} pages "
        f"of {report.page_size}; medians of {report.repeats}",
        f"{'':<32}{'measured':>15}{'target':>15}",
    ]
    for text, name, unit in rows:
        value = f"{getattr(report, name):.4g} {unit}"
        target = f"< {TARGETS[name]:g} {unit}" if name in TARGETS else ""
        verdict = ("  met" if met[name] else "  missed") if name in met else ""
        lines.append(f"{text:<32}{value:>15}{target:>15}{verdict}")
    lines.append(f"A lookup is {report.included}.")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options to `parser`."""
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens to cache (default: %(default)s)")
    parser.add_argument("--sequences", type=int, default=2_000, help="branched sequences (default: %(default)s)")
    parser.add_argument("--siblings", type=int, default=5_000, help="children of one page (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=50, help="timed lookups, after a warm-up (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the tokens and branches (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    report = measure(args.tokens, args.sequences, args.siblings, args.repeats, args.seed)
    if args.json:
        print(json.dumps({**asdict(report), "targets": TARGETS, "met": report.met()}))
    else:
        print(render(report))
    return 0
