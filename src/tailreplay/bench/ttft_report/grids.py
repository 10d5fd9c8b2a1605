"""The tables of a report, and what their columns mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tailreplay.ablation import ABLATIONS
from tailreplay.bench.ttft_plan import TARGET
from tailreplay.bench.ttft_report.labels import Row, percent
from tailreplay.bench.ttft_rows import PHASES
from tailreplay.evals.report.grids import Grid, Section
from tailreplay.sizes import format_bytes

TIMES = (
    "prefix", "r", "variant", "full ms", "mean", "p95", "hit ms", "mean", "p95", "speed-up", "FLOP limit", "vs limit",
)  # fmt: skip
SPLIT = ("prefix", "r", "variant", *PHASES[:3], "byte limit", *PHASES[3:], "MiB loaded")

_TIMES_TEXT = (
    "Milliseconds from the request to its first token: median, mean and 95th percentile of full prefills and of hits, "
    "taken in turn. Speed-up: ratio of the medians. FLOP limit: operations of a full prefill over those of the hit, from "
    "the config. vs limit: the hit's time over that of its operations at the rate of the full prefill; at most "
    f"{TARGET}x is the target. Hits with skip leave out the feed-forward part after each group's last mixer; with overlap "
    "keys and values are copied beside the replay."
)
_SPLIT_TEXT = (
    "Medians in milliseconds. Lookup: the match in the catalog and its plan. Fetch: from tiers below host memory; there "
    "are none in this benchmark. Copy: keys and values into place, its byte limit: as many bytes at the bandwidth of a "
    "plain copy. Replay: hiddens into place and through the linear layers. Query: the forward of the tokens after the "
    "prefix, and sampling; in vLLM all that is left of the request, so its steps, their scheduling, input and output too. "
    "MiB loaded: keys, values and the tail's hiddens."
)
_IN_LINE = " On CPU copies run in line: there overlap changes nothing."
_BESIDE = " Copies run beside the replay with overlap, so the parts may add up to more than the whole."


def sections_of(report: dict[str, Any]) -> list[Section]:
    """Return the tables of measured rows, for each model and engine."""
    on_cpu = any(run["device"] == "cpu" for run in report["runs"])
    on_cuda = any(run["device"] != "cpu" for run in report["runs"])
    notes = (_IN_LINE if on_cpu else "") + (_BESIDE if on_cuda else "")
    groups = _groups(report["rows"])
    return [
        Section(
            "Time to first token",
            _TIMES_TEXT + verdict(report["rows"]),
            tuple(Grid(title, TIMES, tuple(map(times_line, rows))) for title, rows in groups),
        ),
        Section(
            "Where a hit's time goes",
            _SPLIT_TEXT + notes,
            tuple(Grid(title, SPLIT, tuple(map(split_line, rows))) for title, rows in groups),
        ),
    ]


def verdict(rows: Sequence[Row]) -> str:
    """Return a sentence on how many hits, carried out as they are meant, come near their limit."""
    whole = [row for row in rows if row["ablation"] == "both"]
    near = sum(row["vs_limit"] <= TARGET for row in whole)
    return f" Here {near} of {len(whole)} rows of skip + overlap are within it." if whole else ""


def times_line(row: Row) -> tuple[str, ...]:
    """Return the cells of a row in the table of times, as `TIMES` names them."""
    return (
        *_names(row),
        *(milliseconds(row[f"{run}{kind}_ms"]) for run in ("full", "hit") for kind in ("", "_mean", "_p95")),
        f"{row['speedup']:.1f}x",
        f"{row['limit']:.1f}x",
        f"{row['vs_limit']:.2f}x",
    )


def split_line(row: Row) -> tuple[str, ...]:
    """Return the cells of a row in the table of phases, as `SPLIT` names them."""
    before, after = PHASES[:3], PHASES[3:]
    return (
        *_names(row),
        *(milliseconds(row[f"{phase}_ms"]) for phase in before),
        milliseconds(row["copy_limit_ms"]),
        *(milliseconds(row[f"{phase}_ms"]) for phase in after),
        f"{row['loaded_mib']:.1f}",
    )


def milliseconds(value: float) -> str:
    """Return a time: two decimals below 10, one below 1,000, none above."""
    digits = 2 if value < 10 else 1 if value < 1000 else 0
    return f"{value:,.{digits}f}"


def limit_grid(found: dict[str, Any]) -> Grid:
    """Return the table of a model's limits, as `ttft_limits.limits_of` found them."""
    longest = f", up to {found['max_tokens']:,} tokens" if found["max_tokens"] else ""
    title = (
        f"{found['model']}, {found['dtype']}: {found['layers']} layers, {found['attention_layers']} of full "
        f"attention{longest}; a token {format_bytes(found['kv_bytes_per_token'])} of keys and values and "
        f"{format_bytes(found['hidden_bytes_per_token'])} of hiddens; states {format_bytes(found['state_bytes'])}; weights "
        f"{format_bytes(found['weight_bytes'])}, to measure it {format_bytes(found['needed_bytes'])} of memory"
    )
    headings = ("prefix", "r", "replayed", "full TFLOP", "hit TFLOP", "limit", "limit, no skip", "cached", "hit loads")
    rows = tuple(
        (
            f"{row['length']:,}",
            percent(row["ratio"]),
            f"{row['replayed']:,}",
            f"{row['full_flops'] / 1e12:.4g}",
            f"{row['hit_flops'] / 1e12:.4g}",
            f"{row['limit']:.1f}x",
            f"{row['limit_without_skip']:.1f}x",
            format_bytes(row["cached_bytes"]),
            format_bytes(row["loaded_bytes"]),
        )
        for row in found["rows"]
    )
    return Grid(title, headings, rows)


def _names(row: Row) -> tuple[str, str, str]:
    return f"{row['length']:,}", percent(row["ratio"]), ABLATIONS[row["ablation"]].label


def _groups(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        title = f"{row['engine']}: {row['model']}, {row['dtype']}, {row['query']:,}-token query"
        groups.setdefault(title, []).append(row)
    return list(groups.items())
