"""The report as plots: speed-up and times against length, and what a hit's time is made of."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from tailreplay.bench.ttft_report.labels import SERIES, Row, label, percent, series, short_length
from tailreplay.bench.ttft_rows import PHASES

_PHASE_COLOURS = ("#4477aa", "#aa3377", "#ccbb44", "#228833", "#bbbbbb")
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

    bars = 1.4 + 0.26 * len(rows)
    # Agg or SVG, whatever the machine's display: a figure made without pyplot starts no window.
    figure = Figure(figsize=(12, 4.8 + bars), layout="constrained")
    axes: dict[str, Any] = figure.subplot_mosaic([["speed", "time"], ["split", "split"]], height_ratios=[4.8, bars])
    colours = _colours(len(series(rows)))
    _speed(axes["speed"], rows, colours)
    _time(axes["time"], rows, colours)
    _split(axes["split"], rows)
    file = io.BytesIO()
    with rc_context({"svg.hashsalt": "ttft"}):
        about: dict[str, Any] = (
            {"metadata": dict.fromkeys(("Date", "Creator", "Format", "Type"))} if kind == "svg" else {}
        )
        figure.savefig(file, format=kind, dpi=120, **about)
    return file.getvalue()


def _speed(axes: Any, rows: Sequence[Row], colours: Sequence[Any]) -> None:
    for colour, places in zip(colours, series(rows), strict=True):
        lengths = [rows[place]["length"] for place in places]
        name = label(rows[places[0]], rows)
        axes.plot(lengths, [rows[place]["limit"] for place in places], color=colour, linestyle=":", linewidth=1)
        axes.plot(lengths, [rows[place]["speedup"] for place in places], color=colour, label=name)
        for place in places:
            row = rows[place]
            axes.plot([row["length"]], [row["speedup"]], "o", markersize=5, color=colour, gid=f"row-{place}")
    axes.plot([], [], color="#666666", linestyle=":", linewidth=1, label="limit by operations")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda speed, _: f"{speed:g}x")
    axes.set_title("Speed-up of a hit")
    _against_length(axes, rows)


def _time(axes: Any, rows: Sequence[Row], colours: Sequence[Any]) -> None:
    for shade, places in enumerate(series(rows, _MODELS)):
        first: dict[int, Row] = {}
        for place in places:
            first.setdefault(rows[place]["length"], rows[place])
        several = len({tuple(str(row[name]) for name in _MODELS) for row in rows}) > 1
        name = "full prefill" + (f", {label(rows[places[0]], rows, _MODELS)}" if several else "")
        style = ("--", "-.", ":")[shade % 3]
        axes.plot(
            list(first), [row["full_ms"] for row in first.values()], color="#222222", linestyle=style, marker="s",
            markersize=4, label=name,
        )  # fmt: skip
    for colour, places in zip(colours, series(rows), strict=True):
        axes.plot(
            [rows[place]["length"] for place in places], [rows[place]["hit_ms"] for place in places], color=colour,
            marker="o", markersize=4, label=f"hit, {label(rows[places[0]], rows)}",
        )  # fmt: skip
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
    axes.set_xlabel("tokens of the prefix")
    axes.grid(color="#e5e5e5", linewidth=0.7)
    axes.legend(fontsize="small")


def _split(axes: Any, rows: Sequence[Row]) -> None:
    places = range(len(rows))
    left = [0.0] * len(rows)
    for phase, colour in zip(PHASES, _PHASE_COLOURS, strict=True):
        widths = [row[f"{phase}_ms"] / row["hit_ms"] for row in rows]
        axes.barh(places, widths, left=left, color=colour, label=phase)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(places, [_bar_name(row, rows) for row in rows], fontsize="small")
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f}%")
    axes.set_title("What a hit's time is made of (medians of phases, of the hit's median)")
    axes.legend(
        fontsize="small", ncols=len(PHASES), loc="upper center", bbox_to_anchor=(0.5, -0.35 / (0.4 + 0.26 * len(rows)))
    )


def _bar_name(row: Row, rows: Sequence[Row]) -> str:
    told = [name for name in SERIES if name != "ratio" and len({str(other[name]) for other in rows}) > 1]
    rest = f", {label(row, rows, told)}" if told else ""
    return f"{short_length(row['length'])}, {percent(row['ratio'])}{rest}"


def _colours(count: int) -> list[Any]:
    from matplotlib import colormaps

    table = colormaps["tab10" if count <= 10 else "tab20"]
    return [table(place % table.N) for place in range(count)]
