"""What eviction policies hit, by replaying traces through the catalog alone, beside one that knows the future."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from tailreplay.bench.eviction_future import Clairvoyant, Future, look_ahead, token_bound
from tailreplay.bench.eviction_replay import Outcome, Replayer
from tailreplay.bench.mooncake import file_trace
from tailreplay.bench.shape_costs import qwen35_4b
from tailreplay.bench.traces import GENERATORS, Trace, made_trace
from tailreplay.catalog import Catalog, check_page_size
from tailreplay.costs import CostModel
from tailreplay.errors import InvalidRequestError
from tailreplay.eviction import LeastRecentlyUsed, Policy
from tailreplay.modes import Reuse, parse_reuse
from tailreplay.policies import ALPHA, FlopAware

SIZES = (0.05, 0.1, 0.2, 0.4, 0.8)
SHARES = (0.125, 0.25, 0.5)
UNLIMITED = 1 << 60


@dataclass(frozen=True)
class Setup:
    """A policy and the share of pages with room for hiddens."""

    name: str
    policy: Callable[[], Policy] = LeastRecentlyUsed
    hidden_share: float = 1.0


@dataclass(frozen=True)
class Row:
    """One replay of a trace.

    Attributes
    ----------
    size : float
        Limit as a share of the bytes of all that the trace stores; 0 for a cache without a limit.
    slots, hidden_slots : int
        Pages, and pages with hiddens, that fit.
    hit_share, saved_share : float
        Tokens hit, of all prompt tokens; operations saved, of those of all prompts without a cache.
    short_tails, cut, no_hiddens : int
        Hits with a shorter tail, hits that were shorter, and misses, because hiddens were gone.
    most_bytes : int
        Highest number of bytes in use; never above `limit_bytes`.
    """

    policy: str
    size: float
    limit_bytes: int
    slots: int
    hidden_slots: int
    hit_tokens: int
    hit_share: float
    saved_share: float
    short_tails: int
    cut: int
    no_hiddens: int
    full: int
    evictions: int
    stripped: int
    most_bytes: int


@dataclass(frozen=True)
class Bound:
    """Tokens that no cache of so many pages can exceed, whatever it knows."""

    size: float
    slots: int
    hit_tokens: int
    hit_share: float


@dataclass(frozen=True)
class Report:
    """All replays of one trace."""

    trace: str
    requests: int
    prompt_tokens: int
    unique_bytes: int
    infinite: Row
    rows: list[Row]
    bounds: list[Bound]


class Bench:
    """Replays traces with pages of one shape.

    Parameters
    ----------
    ratio : float
        Share of a match that is replayed.

    Raises
    ------
    CacheConfigError
        If the page size is not a multiple of 16.
    InvalidRequestError
        If the ratio is not in (0, 1].
    """

    def __init__(self, costs: CostModel, page_size: int, ratio: float) -> None:
        check_page_size(page_size)
        self._costs, self._page_size = costs, page_size
        self._reuse: Reuse = parse_reuse("replay", ratio)
        self.page_bytes = page_size * costs.page_bytes_per_token
        self._hidden_bytes = page_size * sum(costs.hidden_bytes)

    def measure(self, trace: Trace, setups: Sequence[Setup], sizes: Sequence[float]) -> Report:
        """Replay `trace` through every setup at every size, and through a cache without a limit."""
        infinite, outcome = self.replay(trace, Setup("infinite"), 0, UNLIMITED)
        # Nothing was evicted, so all that the trace stores is there at the end.
        unique = infinite.most_bytes
        future = look_ahead(trace, self._page_size)
        rows, bounds = [], []
        for size in sizes:
            limit = max(round(size * unique), self.page_bytes)
            for setup in setups:
                rows.append(self.replay(trace, setup, size, limit)[0])
            rows.append(self._clairvoyant(trace, future, size, limit))
            for slots in sorted({row.slots for row in rows if row.size == size}):
                tokens = token_bound(future, slots, self._page_size, outcome.matched)
                bounds.append(Bound(size, slots, tokens, tokens / outcome.prompt_tokens))
        return Report(trace.name, len(outcome.matched), outcome.prompt_tokens, unique, infinite, rows, bounds)

    def replay(
        self, trace: Trace, setup: Setup, size: float, limit: int, oracle: Clairvoyant | None = None
    ) -> tuple[Row, Outcome]:
        """Replay `trace` once in a cache of `limit` bytes."""
        catalog = Catalog(
            self._page_size,
            limit,
            self.page_bytes,
            hidden_bytes=self._hidden_bytes,
            hidden_share=setup.hidden_share,
            policy=setup.policy(),
        )
        outcome = Replayer(catalog, self._reuse, self._costs, oracle).run(trace)
        row = Row(
            setup.name,
            size,
            limit,
            catalog.slots,
            catalog.hidden_slots,
            outcome.hit_tokens,
            outcome.hit_tokens / outcome.prompt_tokens,
            outcome.saved_flops / outcome.full_flops,
            outcome.short_tails,
            outcome.cut,
            outcome.no_hiddens,
            outcome.full,
            catalog.evictions,
            catalog.stripped,
            outcome.most_bytes,
        )
        return row, outcome

    def _clairvoyant(self, trace: Trace, future: Future, size: float, limit: int) -> Row:
        oracle = Clairvoyant(future, self._page_size)
        return self.replay(trace, Setup(oracle.name, lambda: oracle), size, limit, oracle)[0]


def setups_of(names: Sequence[str], shares: Sequence[float], costs: CostModel, alpha: float) -> list[Setup]:
    """Return the setups of the policies `names`; "hiddens-first" is the least recently used page at each of `shares`."""
    made = []
    for name in names:
        if name == "lru":
            made.append(Setup(name))
        elif name == "flops":
            made.append(Setup(name, lambda: FlopAware.of(costs, alpha)))
        else:
            made += [Setup(f"{name} {share:g}", hidden_share=share) for share in shares]
    return made


def render(report: Report) -> str:
    """Return two Markdown tables: what is hit and saved, and what gone hiddens did."""
    sizes = list(dict.fromkeys(row.size for row in report.rows))
    names = list(dict.fromkeys(row.policy for row in report.rows))
    rows = {(row.policy, row.size): row for row in report.rows}
    bounds = {(bound.slots, bound.size): f"{bound.hit_share:.1%}" for bound in report.bounds}
    roomier = [name for name in names if rows[name, sizes[0]].slots > rows[names[-1], sizes[0]].slots]
    heads = [f"{size:.0%}" for size in sizes]
    lines = [
        f"**{report.trace}**: {report.requests:,} requests, {report.prompt_tokens:,} prompt tokens, "
        f"{report.unique_bytes / 2**30:.1f} GiB to store; without a limit {_cell(report.infinite)}",
        "",
        *_table(
            ["policy", *heads],
            [[name, *(_cell(rows[name, size]) for size in sizes)] for name in names]
            + [
                [f"at most, {text}", *(bounds[rows[name, size].slots, size] for size in sizes)]
                for text, name in [("as many pages", names[-1]), *((name, name) for name in roomier)]
            ],
        ),
    ]
    stripped = [name for name in names if any(rows[name, size].stripped for size in sizes)]
    if stripped:
        cells = [[name, *(_losses(rows[name, size]) for size in sizes)] for name in stripped]
        lines += ["", *_table(["short tails / shorter hits / misses for want of hiddens", *heads], cells)]
    return "\n".join(lines)


def _cell(row: Row) -> str:
    return f"{row.hit_share:.1%} ({row.saved_share:.1%})"


def _losses(row: Row) -> str:
    return f"{row.short_tails:,} / {row.cut:,} / {row.no_hiddens:,}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for cells in (head, ["---"] + ["---:"] * (len(head) - 1), *rows):
        yield f"| {' | '.join(cells)} |"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options to `parser`."""
    policies = ["lru", "flops", "hiddens-first"]
    parser.add_argument("--traces", nargs="+", choices=GENERATORS, help="made traces (default: all)")
    parser.add_argument("--trace", metavar="FILE", help="a trace in Mooncake's format instead: JSON lines")
    parser.add_argument("--requests", type=int, default=3_000, help="of each made trace (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the made traces (default: %(default)s)")
    parser.add_argument("--policies", nargs="+", choices=policies, default=policies)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="of hiddens, for hiddens-first")
    parser.add_argument("--alpha", type=float, default=ALPHA, help="of flops (default: %(default)s)")
    parser.add_argument("--sizes", type=float, nargs="+", default=SIZES, help="of the cache, as shares of all bytes")
    parser.add_argument("--ratio", type=float, default=0.05, help="share of a match to replay (default: %(default)s)")
    parser.add_argument("--page-size", type=int, default=64, help="tokens (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    _check(arguments)
    costs = qwen35_4b()
    bench = Bench(costs, arguments.page_size, arguments.ratio)
    setups = setups_of(arguments.policies, arguments.shares, costs, arguments.alpha)
    reports = []
    for trace in _traces(arguments):
        print(f"replaying {trace.name} …", file=sys.stderr, flush=True)
        reports.append(bench.measure(trace, setups, arguments.sizes))
        if not arguments.json:
            print(render(reports[-1]), end="\n\n", flush=True)
    if arguments.json:
        print(json.dumps({"page_bytes": bench.page_bytes, "reports": [asdict(report) for report in reports]}))
    else:
        print(
            "Prompt tokens that were hit, and in brackets operations saved, at limits that are shares of all bytes stored."
        )
    return 0


def _traces(arguments: argparse.Namespace) -> list[Trace]:
    if arguments.trace is not None:
        return [file_trace(arguments.trace)]
    names = arguments.traces or list(GENERATORS)
    return [made_trace(name, arguments.requests, arguments.seed) for name in names]


def _check(arguments: argparse.Namespace) -> None:
    if arguments.requests < 1 or arguments.seed < 0:
        raise InvalidRequestError("The bench needs at least one request, and a seed of at least 0.")
    if arguments.trace is not None and arguments.traces:
        raise InvalidRequestError("Give either --trace or --traces.")
    if not all(0 < share <= 1 for share in [*arguments.sizes, *arguments.shares]):
        raise InvalidRequestError("Sizes and shares must lie in (0, 1].")
