"""Quality against cost: one line a start, one column a length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tailreplay.bench.starts_rows import PAPER, StartRow
from tailreplay.evals.start_rules import ANCHORED, BLENDED, CARRIED, DECAYED, MEAN, MIXED, RECOMPUTE

_NAMES = {
    PAPER: "zero states (the paper)",
    MEAN: "mean: the model's mean state, no anchor",
    MIXED: "mixed: half anchor, half mean",
    BLENDED: "blended: decayed towards the mean",
    CARRIED: "carried: the last anchor's states as they are",
    DECAYED: "carried and decayed",
    RECOMPUTE: "no hiddens: the tail through the whole model",
    ANCHORED: "exact: all tokens after the last anchor",
}
_LOOKS: dict[str, dict[str, Any]] = {
    PAPER: {"color": "#888888", "marker": "o"},
    MEAN: {"color": "#ccbb44", "marker": "D"},
    CARRIED: {"color": "#4477aa", "marker": "s"},
    MIXED: {"color": "#aa3377", "marker": "P"},
    BLENDED: {"color": "#222222", "marker": "x"},
    DECAYED: {"color": "#66ccee", "marker": "v", "linestyle": "none"},
    RECOMPUTE: {"color": "#ee6677", "marker": "^"},
    ANCHORED: {"color": "#228833", "marker": "*", "linestyle": "none", "markersize": 12},
}


def draw(figure: Any, rows: Sequence[StartRow]) -> None:
    """Draw divergence (above) and retention (below) against the replay's operations on a matplotlib figure."""
    lengths = sorted({row.length for row in rows})
    figure.set_size_inches(4.6 * max(1, len(lengths)), 8)
    grid = figure.subplots(2, max(1, len(lengths)), squeeze=False, sharey="row")
    for column, length in enumerate(lengths):
        here = [row for row in rows if row.length == length]
        _divergence(grid[0][column], here)
        _retention(grid[1][column], here)
        grid[0][column].set_title(f"{length:,} tokens")
        for axes in grid[:, column]:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
            axes.set_xlabel("operations of the replay, of a full prefill's")
            axes.grid(color="#e5e5e5", linewidth=0.7)
    grid[0][0].set_ylabel("plain text: KL from full prefill, nats")
    grid[1][0].set_ylabel("score kept on what needs the states")
    handles = {line.get_label(): line for axes in grid.flat for line in axes.get_legend_handles_labels()[0]}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize="small")


def line_of(rows: Sequence[StartRow], start: str) -> list[StartRow]:
    """Return the rows of one start, cheapest first: of several anchors the first that is a number of tokens, if any."""
    found = sorted((row for row in rows if row.start == start), key=lambda row: row.flops)
    if start == ANCHORED:
        return found
    anchors = sorted({row.anchor for row in found if row.anchor}, key=lambda anchor: (anchor.endswith("%"), anchor))
    return [row for row in found if not anchors or row.anchor == anchors[0]]


def _divergence(axes: Any, rows: Sequence[StartRow]) -> None:
    known = [row.kl.value for row in rows if row.kl.value]
    floor = min((value for value in known if value > 1e-6), default=1e-4) / 2
    for start, look in _LOOKS.items():
        line = [row for row in line_of(rows, start) if row.kl.value is not None]
        if line:
            # Exact states diverge by rounding alone: on the lower edge, where a log axis can show them.
            values = [max(row.kl.value or 0.0, floor) for row in line]
            axes.plot([row.flops_share for row in line], values, label=_NAMES[start], **look)
    axes.set_yscale("log")


def _retention(axes: Any, rows: Sequence[StartRow]) -> None:
    for start, look in _LOOKS.items():
        line = [row for row in line_of(rows, start) if row.retention.value is not None]
        if line:
            values = [row.retention.value for row in line]
            axes.plot([row.flops_share for row in line], values, label=_NAMES[start], **look)
            # The intervals of two: all of them over each other cannot be told apart.
            sure = [row for row in line if row.retention.low is not None and start in (PAPER, MIXED)]
            lows, highs = [row.retention.low for row in sure], [row.retention.high for row in sure]
            axes.fill_between([r.flops_share for r in sure], lows, highs, color=look["color"], alpha=0.1, linewidth=0)
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f}%")
