"""Rows of starts as tables, and what they say of the choice of a default, in plain sentences."""

from __future__ import annotations

from collections.abc import Sequence

from tailreplay.bench.starts_rows import PAPER, StartRow
from tailreplay.evals.report.grids import NOTHING, Grid, number, percent, percent_interval, signed
from tailreplay.evals.start_rules import BLENDED, CARRIED, MEAN, MIXED

HEADINGS = (
    "start",
    "r",
    "anchor",
    "distance",
    "replayed",
    "state error",
    "in 4 heads",
    "NLL, first 8",
    "NLL, all",
    "KL, first 8",
    "KL, all",
    "worse hits",
    "mid-question",
    "count inside",
    "count before",
    "retention",
    "operations",
    "bytes/token",
)
HALF = 0.5


def grids_of(rows: Sequence[StartRow]) -> list[Grid]:
    """Return one table a length."""
    return [
        Grid(f"{length:,} tokens", HEADINGS, tuple(_texts(row) for row in rows if row.length == length))
        for length in sorted({row.length for row in rows})
    ]


def verdict_lines(rows: Sequence[StartRow]) -> list[str]:
    """Return for each length, budget and anchor whether a start halves what the paper's loses at equal tokens."""
    lines = []
    paper = {(row.length, row.ratio): row for row in rows if row.start == PAPER}
    for row in rows:
        beside = paper.get((row.length, row.ratio))
        if (
            row.start not in (BLENDED, CARRIED, MEAN, MIXED)
            or beside is None
            or not row.kl.value
            or not beside.kl.value
        ):
            continue
        share = row.kl.value / beside.kl.value
        anchor = f", anchor {row.anchor}" if row.anchor else ""
        word = "holds" if share <= HALF else "does not hold"
        lines.append(
            f"{row.length:,} tokens, r = {100 * (row.ratio or 0):g}%, {row.start}{anchor}: divergence {share:.2f} of the "
            f"paper's start (at most {HALF:g} {word}); NLL gap {signed(row.nll_gap.value, 4)} against "
            f"{signed(beside.nll_gap.value, 4)}; retention {percent(row.retention.value)} against "
            f"{percent(beside.retention.value)}."
        )
    return lines


def _texts(row: StartRow) -> tuple[str, ...]:
    question = row.scores.get("mid_question")
    return (
        row.start,
        NOTHING if row.ratio is None else f"{100 * row.ratio:g}%",
        row.anchor or NOTHING,
        number(row.distance, 0),
        number(row.replayed, 0),
        number(row.state_error, 3),
        percent(row.worst_heads, 0),
        signed(row.first_nll_gap.value, 4),
        signed(row.nll_gap.value, 4),
        number(row.first_kl.value, 5),
        number(row.kl.value, 5),
        NOTHING if row.worse is None else "{} of {}".format(*row.worse),
        number(question.value if question else None),
        _split(row.inside),
        _split(row.outside),
        percent_interval(row.retention),
        percent(row.flops_share, 2),
        f"{row.token_bytes:,.0f}",
    )


def _split(split: tuple[int, float | None, float | None]) -> str:
    count, score, full = split
    return f"{number(score)} ({number(full)}), {count}" if count else NOTHING
