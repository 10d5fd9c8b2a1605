"""What was measured of starts, as rows: one a length and method."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tailreplay.costs import CostModel
from tailreplay.evals.cells import paired
from tailreplay.evals.methods import FULL, ZERO, parse_method
from tailreplay.evals.observations import Observations, observe
from tailreplay.evals.rows import mean_scores
from tailreplay.evals.start_rules import ANCHORED, RECOMPUTE, Start
from tailreplay.evals.starts import flops
from tailreplay.evals.statistics import Estimate, difference, estimate, ratio
from tailreplay.evals.tasks.registry import TASKS

WORST_HEADS = 4
NO_REPLAY, PAPER = "none", "zero"
Record = Mapping[str, Any]


@dataclass(frozen=True)
class StartRow:
    """A start at one length.

    Attributes
    ----------
    start : str
        "zero" is the paper's; "none" replays nothing; else as in `tailreplay.evals.start_rules`.
    ratio : float or None
    anchor : str or None
        Tokens between anchors, or the anchor's share of the match.
    distance, replayed : float or None
        Mean tokens from the anchor to the match's end, and mean tokens replayed.
    state_error : float
        ``||S - S_true|| / ||S_true||`` of all states together.
    worst_heads : float or None
        Share of the squared error that the four worst heads hold.
    first_nll_gap, nll_gap : Estimate
        Nats a token above full prefill's in plain text: of the first 8 tokens, and of all 128.
    first_kl, kl : Estimate
        KL divergence from full prefill's prediction of the same tokens, nats a token.
    median_share : float or None
        Median over hits of the divergence over that of the paper's start at equal replayed tokens.
    worse : tuple of int or None
        At how many hits it is the higher one, and of how many.
    scores : dict of str to Estimate
        By task.
    retention : Estimate
        Mean score of the tasks over full prefill's.
    inside, outside : list
        Running counts set inside and before the tail: number, score, full prefill's score.
    flops : float
        Mean operations of the replay.
    flops_share : float
        The same over a full prefill's of the same tokens.
    token_bytes : float
        Cached bytes a token: keys, values, hiddens if it needs them, and an anchor every so many tokens.
    """

    length: int
    method: str
    start: str
    ratio: float | None
    anchor: str | None
    distance: float | None
    replayed: float
    state_error: float
    worst_heads: float | None
    first_nll_gap: Estimate
    nll_gap: Estimate
    first_kl: Estimate
    kl: Estimate
    median_share: float | None
    worse: tuple[int, int] | None
    scores: dict[str, Estimate]
    retention: Estimate
    inside: tuple[int, float | None, float | None]
    outside: tuple[int, float | None, float | None]
    flops: float
    flops_share: float
    token_bytes: float

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON holds it."""
        return asdict(self)


def rows_of(records: Iterable[Record], costs: CostModel, seed: int = 0) -> list[StartRow]:
    """Return a row for each length and method that rebuilds states; by length, then as methods are ordered."""
    cells = observe(records, {name: task.info for name, task in TASKS.items()}, seed)
    found = []
    for length in sorted({cell.length for cell in cells}):
        here = [cell for cell in cells if cell.length == length]
        methods = dict.fromkeys(name for cell in here for hit in cell.hits for name in hit.get("head_error", ()))
        found += [_row(here, name, costs) for name in methods]
    return found


def _row(cells: Sequence[Observations], name: str, costs: CostModel) -> StartRow:
    method = parse_method(name)
    hits = [hit for cell in cells for hit in cell.hits if name in hit.get("head_error", ())]
    distances = [hit["matched"] - hit["anchors"][name] for hit in hits if name in hit["anchors"]]
    error, worst = _state_error(hits, name)
    prose = [cell for cell in cells if cell.has("first_nll")]
    scored = {cell.task.name: cell for cell in cells if cell.has("score")}
    operations = [_flops(hit, name, method.start, costs) for hit in hits]
    full = sum(costs.prefill_flops(0, hit["matched"]) for hit in hits)
    start = method.start.kind if method.start else NO_REPLAY if name == ZERO else PAPER
    shares = method.start and method.start.kind != ANCHORED
    beside = f"replay@{method.start.ratio:g}" if method.start and shares else name
    median, worse = _against(prose, name, beside)
    return StartRow(
        length=cells[0].length,
        method=name,
        start=start,
        ratio=method.start.ratio if method.start and shares else method.reuse.ratio if method.reuse else None,
        anchor=method.start.anchor.name if method.start and method.start.anchored else None,
        distance=_mean(distances) if distances else None,
        replayed=_mean([hit["tails"][name] for hit in hits]),
        state_error=error,
        worst_heads=worst,
        first_nll_gap=_gap(prose, "first_nll", name),
        nll_gap=_gap(prose, "nll", name),
        first_kl=estimate(prose[0].mean(name, "first_kl")) if prose else Estimate(),
        kl=estimate(prose[0].mean(name, "kl")) if prose else Estimate(),
        median_share=median,
        worse=worse,
        scores={task: estimate(cell.mean(name, "score")) for task, cell in scored.items()},
        retention=estimate(ratio(*mean_scores(list(scored.values()), name, FULL))),
        inside=_split(scored.get("count"), name, True),
        outside=_split(scored.get("count"), name, False),
        flops=sum(operations) / len(hits),
        flops_share=sum(operations) / full,
        token_bytes=_token_bytes(method.start, costs, _mean([hit["matched"] for hit in hits])),
    )


def _flops(hit: Record, name: str, start: Start | None, costs: CostModel) -> float:
    if start is not None:
        return flops(costs, start, hit["matched"])
    tail = hit["tails"][name]
    return costs.replay_flops([min(tail, group.receptive_field or tail) for group in costs.topology.groups])


def _token_bytes(start: Start | None, costs: CostModel, matched: float) -> float:
    if start is not None and start.kind == RECOMPUTE:
        return costs.kv_bytes
    if start is None or not start.anchored:
        return costs.page_bytes_per_token
    return costs.page_bytes_per_token + costs.state_bytes / (start.anchor.interval or matched)


def _state_error(hits: Sequence[Record], name: str) -> tuple[float, float | None]:
    errors = np.sum([hit["head_error"][name] for hit in hits], axis=0)
    norm = float(np.sum([hit["head_norm"] for hit in hits]))
    total = float(errors.sum())
    worst = float(np.sort(errors)[-WORST_HEADS:].sum()) / total if total > 0 else None
    return math.sqrt(total / norm), worst


def _gap(cells: Sequence[Observations], field: str, name: str) -> Estimate:
    return estimate(difference(*paired(cells[0], field, name, FULL))) if cells else Estimate()


def _against(cells: Sequence[Observations], name: str, paper: str) -> tuple[float | None, tuple[int, int] | None]:
    """Return the median share of the paper's divergence, and how often it is more than all of it."""
    if not cells or name == paper:
        return None, None
    shares = cells[0].values(name, "kl") / cells[0].values(paper, "kl")
    shares = shares[np.isfinite(shares)]
    if not len(shares):
        return None, None
    return float(np.median(shares)), (int((shares > 1).sum()), len(shares))


def _split(cell: Observations | None, name: str, wanted: bool) -> tuple[int, float | None, float | None]:
    if cell is None:
        return 0, None, None
    where = np.array([probe.inside(name) is wanted for probe in cell.probes], dtype=np.bool_)
    method, full = (estimate(cell.mean(one, "score", where=where)).value for one in (name, FULL))
    return int(where.sum()), method, full


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
