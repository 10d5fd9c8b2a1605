"""The report as a picture: what a hit keeps against how much it replays, and the states by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tailreplay.evals.methods import EXACT, ZERO, label, ratio_of
from tailreplay.evals.rows import Row
from tailreplay.evals.statistics import Estimate
from tailreplay.evals.summary import LayerErrors, Summary

Pick = Callable[[Row], Estimate]

_ZERO_BELOW = 2.5
"""Zero states stand left of the smallest share, by this factor: a log axis has no 0."""


def draw(summary: Summary, path: Path) -> None:
    """Draw three panels as a PNG: retention, NLL gap closed, and state error by layer.

    Parameters
    ----------
    summary : Summary
    path : Path
        Where to write the picture.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.8), layout="constrained")
    retention, gap, states = figure.subplots(1, 3)
    _against_ratio(retention, summary, [(_retention, "-", ""), (_retention_boundary, "--", ", clean boundary")])
    retention.set_title("Score kept, of full prefill's")
    _against_ratio(gap, summary, [(_gap, "-", "")])
    gap.set_title("NLL gap closed between zero states and full prefill")
    _state_errors(states, summary.state_error)
    # Agg, whatever the machine's display: a figure made without pyplot starts no window.
    figure.savefig(path, format="png", dpi=120)


def _retention(row: Row) -> Estimate:
    return row.retention


def _retention_boundary(row: Row) -> Estimate:
    return row.retention_boundary


def _gap(row: Row) -> Estimate:
    return row.nll_gap_closed


def _against_ratio(axes: Any, summary: Summary, curves: Sequence[tuple[Pick, str, str]]) -> None:
    """Draw a curve for each length, with zero states at the left edge."""
    ratios = sorted({r for row in summary.rows if (r := ratio_of(row.method)) is not None})
    left = min(ratios, default=1) / _ZERO_BELOW
    axes.set_xscale("log")
    for colour, (length, rows) in zip(_shades(len(summary.by_length)), summary.by_length.items(), strict=True):
        for pick, style, what in curves:
            _curve(axes, rows, pick, {"color": colour, "linestyle": style, "label": f"{length:,} tokens{what}"})
            _zero(axes, rows, pick, left, colour, filled=style == "-")
    if not axes.get_legend_handles_labels()[0]:
        _nothing(axes)
        return
    _label_ratios(axes, left, ratios)


def _curve(axes: Any, rows: Sequence[Row], pick: Pick, look: Mapping[str, Any]) -> None:
    points = {r: pick(row) for row in rows if (r := ratio_of(row.method)) is not None and pick(row).value is not None}
    if not points:
        return
    ratios = sorted(points)
    axes.plot(ratios, [points[r].value for r in ratios], marker="o", markersize=4, **look)
    if look["linestyle"] != "-":
        # Only the curves that speak of r get their intervals: all of them over each other cannot be told apart.
        return
    sure = [r for r in ratios if points[r].low is not None]
    lows, highs = [points[r].low for r in sure], [points[r].high for r in sure]
    axes.fill_between(sure, lows, highs, color=look["color"], alpha=0.15, linewidth=0)


def _zero(axes: Any, rows: Sequence[Row], pick: Pick, left: float, colour: Any, filled: bool) -> None:
    for estimate in (pick(row) for row in rows if row.method == ZERO):
        if estimate.value is None:
            continue
        axes.plot(
            [left], [estimate.value], marker="D", markersize=5, color=colour, fillstyle="full" if filled else "none"
        )
        if estimate.low is not None:
            axes.vlines(left, estimate.low, estimate.high, color=colour, alpha=0.5)


def _label_ratios(axes: Any, left: float, ratios: Sequence[float]) -> None:
    axes.set_xticks([left, *ratios], ["zero", *(f"{100 * r:g}%" for r in ratios)])
    axes.set_xticks([], minor=True)
    axes.axvline((left * ratios[0]) ** 0.5, color="#bbbbbb", linewidth=0.8, linestyle=":")
    axes.axhline(1, color="#bbbbbb", linewidth=0.8)
    axes.set_xlabel("share of the prefix replayed, r")
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f}%")
    axes.legend(fontsize="small")


def _state_errors(axes: Any, groups: Sequence[LayerErrors]) -> None:
    """Draw the errors at the greatest length only: the lines of several lengths would hide each other."""
    longest = max((errors.length for errors in groups), default=0)
    shown = [errors for errors in groups if errors.length == longest]
    if not shown:
        _nothing(axes)
        return
    replayed = [errors for errors in shown if ratio_of(errors.method) is not None]
    colours = dict(
        zip((errors.method for errors in reversed(replayed)), _shades(len(replayed), "plasma_r"), strict=True)
    )
    for errors in shown:
        style = {ZERO: ":", EXACT: "--"}.get(errors.method, "-")
        look = {"color": colours.get(errors.method, "#888888"), "linestyle": style}
        values = [float("nan") if error is None else error for error in errors.errors]
        axes.plot(range(len(values)), values, marker="o", markersize=3, label=label(errors.method), **look)
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("linear layer")
    axes.set_title(f"State error by layer, {longest:,} tokens")
    axes.legend(fontsize="small")


def _shades(count: int, name: str = "viridis_r") -> list[Any]:
    """Return colours from light to dark, for things that have an order."""
    from matplotlib import colormaps

    return [colormaps[name](0.2 + 0.75 * (place + 1) / count) for place in range(count)]


def _nothing(axes: Any) -> None:
    axes.clear()
    axes.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axes.transAxes)
    axes.set_axis_off()
