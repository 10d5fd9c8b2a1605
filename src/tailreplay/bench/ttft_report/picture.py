"""The report as plots: speed-up and times against length, and what a hit's time is made of."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from tailreplay.bench.ttft_report.labels import SERIES, Row, label, percent, series, short_length
from tailreplay.bench.ttft_rows import PHASES

_PHASE_COLOURS = ("#4477aa", "#aa3377", "#ccbb44", "#228833", "#bbbbbb")
_LIMIT: dict[str, Any] = {"linestyle": ":", "linewidth": 1, "marker": "_"}
_NAMES_ABREAST = 3
_MODELS = ("model", "engine", "dtype", "query")


def picture(rows: Sequence[Row], kind: str) -> bytes:
    """Draw the plots of all rows.

    Parameters
    ----------
    kind : str
        "png" or "svg". In an SVG, the point of row i in the plot of speed-ups has the id ``row-i``.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    curves = series(rows)
    names = -(-(len(curves) + 2) // _NAMES_ABREAST)
    top, bottom = 4.6 + 0.22 * names, 1.3 + 0.26 * len(rows)
    # Agg or SVG, whatever the machine's display: a figure made without pyplot starts no window.
    figure = Figure(figsize=(12, top + bottom), layout="constrained")
    halves: Any = figure.subfigures(2, 1, height_ratios=[top, bottom])
    upper, lower = halves
    speed, time = upper.subplots(1, 2)
    _speed(speed, rows, curves)
    _time(time, rows, curves)
    lines = {line.get_label(): line for axes in (time, speed) for line in axes.get_legend_handles_labels()[0]}
    upper.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=_NAMES_ABREAST, fontsize="small")
    _split(lower, rows)
    file = io.BytesIO()
    with rc_context({"svg.hashsalt": "ttft"}):
        about: dict[str, Any] = (
            {"metadata": dict.fromkeys(("Date", "Creator", "Format", "Type"))} if kind == "svg" else {}
        )
        figure.savefig(file, format=kind, dpi=120, **about)
    return file.getvalue()


def _speed(axes: Any, rows: Sequence[Row], curves: Sequence[list[int]]) -> None:
    for colour, places in zip(_colours(len(curves)), curves, strict=True):
        lengths = [rows[place]["length"] for place in places]
        axes.plot(lengths, [rows[place]["limit"] for place in places], color=colour, **_LIMIT)
        axes.plot(lengths, [rows[place]["speedup"] for place in places], color=colour)
        for place in places:
            row = rows[place]
            axes.plot([row["length"]], [row["speedup"]], "o", markersize=5, color=colour, gid=f"row-{place}")
    axes.plot([], [], color="#666666", label="limit by operations", **_LIMIT)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda speed, _: f"{speed:g}x")
    axes.set_title("Speed-up of a hit")
    _against_length(axes, rows)


def _time(axes: Any, rows: Sequence[Row], curves: Sequence[list[int]]) -> None:
    models = series(rows, _MODELS)
    for shade, places in enumerate(models):
        # All hits of a length are compared with the same full prefills.
        full = {rows[place]["length"]: rows[place]["full_ms"] for place in places}
        name = "full prefill" + (f", {label(rows[places[0]], rows, _MODELS)}" if len(models) > 1 else "")
        look = {"color": "#222222", "linestyle": ("--", "-.", (0, (1, 1)))[shade % 3], "marker": "s", "markersize": 4}
        axes.plot(list(full), list(full.values()), label=name, **look)
    for colour, places in zip(_colours(len(curves)), curves, strict=True):
        lengths, times = zip(*((rows[place]["length"], rows[place]["hit_ms"]) for place in places), strict=True)
        axes.plot(lengths, times, color=colour, marker="o", markersize=4, label=label(rows[places[0]], rows))
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:,g}" if f"{value:e}"[0] in "25" else "")
    axes.set_title("Time to first token, ms (medians)")
    _against_length(axes, rows)


def _against_length(axes: Any, rows: Sequence[Row]) -> None:
    lengths = sorted({row["length"] for row in rows})
    axes.set_xscale("log")
    axes.set_xticks(lengths, [short_length(length) for length in lengths])
    axes.set_xticks([], minor=True)
    axes.set_xlim(lengths[0] / 1.2, lengths[-1] * 1.2)
    axes.set_xlabel("tokens of the prefix")
    axes.grid(color="#e5e5e5", linewidth=0.7)


def _split(figure: Any, rows: Sequence[Row]) -> None:
    axes = figure.subplots()
    places = range(len(rows))
    left = [0.0] * len(rows)
    for phase, colour in zip(PHASES, _PHASE_COLOURS, strict=True):
        widths = [row[f"{phase}_ms"] / row["hit_ms"] for row in rows]
        axes.barh(places, widths, left=left, color=colour, label=phase)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(places, [_bar_name(row, rows) for row in rows], fontsize="small")
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f}%")
    axes.set_title("What a hit's time is made of (medians of phases, of the hit's median)")
    figure.legend(loc="outside lower center", ncols=len(PHASES), fontsize="small")


def _bar_name(row: Row, rows: Sequence[Row]) -> str:
    told = [name for name in SERIES if name != "ratio" and len({str(other[name]) for other in rows}) > 1]
    rest = f", {label(row, rows, told)}" if told else ""
    return f"{short_length(row['length'])}, {percent(row['ratio'])}{rest}"


def _colours(count: int) -> list[Any]:
    from matplotlib import colormaps

    table = colormaps["tab10" if count <= 10 else "tab20"]
    return [table(place % table.N) for place in range(count)]
