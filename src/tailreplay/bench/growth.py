"""How costs grow from a thousand to a million tokens: what was measured, a model fitted to it, and how well it holds."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

from tailreplay.bench.growth_model import Growth, Work, fitted, work_of
from tailreplay.bench.ttft_plan import parse_length
from tailreplay.errors import InvalidRequestError
from tailreplay.sizes import format_bytes

_LENGTHS = ("1K", "4K", "8K", "16K", "32K", "64K", "128K", "256K", "512K", "1024K")


class Kind(NamedTuple):
    """What rows of one curve have in common."""

    model: str
    engine: str
    dtype: str
    ratio: float
    query: int
    device: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options to `parser`."""
    parser.add_argument(
        "--from",
        dest="saved",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help="rows that `tailreplay bench ttft --save FILE` has written",
    )
    parser.add_argument(
        "--fit-to", type=parse_length, default=8192, metavar="LENGTH",
        help="check the model: fit it to prefixes up to this length, and predict the longer ones (default: 8K)",
    )  # fmt: skip
    parser.add_argument(
        "--lengths", type=parse_length, nargs="+", default=[parse_length(text) for text in _LENGTHS],
        metavar="LENGTH", help="prefixes to model (default: 1K to 1024K)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Fit, check and print; returns the exit status."""
    from tailreplay.bench.ttft_saved import load

    kinds: dict[Kind, list[dict[str, Any]]] = {}
    for record in load(arguments.saved):
        row = record["row"]
        if row["ablation"] == "both":
            kind = Kind(row["model"], row["engine"], row["dtype"], row["ratio"], row["query"], record["run"]["device"])
            kinds.setdefault(kind, []).append(row)
    if not kinds:
        raise InvalidRequestError("There are no rows of whole hits to fit a model to: measure with --ablations both.")
    curves = [curve(kind, rows, arguments) for kind, rows in kinds.items()]
    if arguments.json:
        print(json.dumps({"fit_to": arguments.fit_to, "curves": curves}))
    else:
        for found in curves:
            _print_tables(found, arguments.fit_to)
    return 0


def curve(kind: Kind, rows: list[dict[str, Any]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the curve of rows of one kind: `check`, predictions of what was measured, and `modelled`.

    Raises
    ------
    InvalidRequestError
        If fewer than two lengths were measured: a line needs two points.
    """
    measured = {row["length"]: row for row in rows}
    if len(measured) < 2:
        raise InvalidRequestError(
            f"{kind.model} on {kind.engine} at r = {kind.ratio:g} with a query of {kind.query:,} was measured at one "
            "length only; the model needs two or more."
        )
    costs = _costs(kind.model, kind.engine, kind.dtype)

    def work(row: dict[str, Any]) -> Work:
        return work_of(costs, row["length"], kind.query, kind.ratio, row["replayed"])

    rows = [measured[length] for length in sorted(measured)]
    short = [row for row in rows if row["length"] <= arguments.fit_to]
    # As rows of whole hits have it: with overlap, where copies can run beside the replay.
    beside = kind.device == "cuda"
    check = []
    if 2 <= len(short) < len(rows):
        growth = fitted(short, work, beside)
        check = [_checked(growth, work(row), row) for row in rows if row["length"] > arguments.fit_to]
    whole = fitted(rows, work, beside)
    modelled = []
    # Far below what was measured, a fixed part that was fitted to long prefixes means nothing.
    for length in (length for length in arguments.lengths if 2 * length >= min(measured)):
        row = measured.get(length)
        counted = work(row) if row else work_of(costs, length, kind.query, kind.ratio)
        times = whole.predict(counted)
        modelled.append(
            {
                "length": length,
                "host_bytes": counted.host_bytes,
                **{f"{name}_ms" if name != "speedup" else name: value for name, value in times.items()},
                **({"measured_full_ms": row["full_ms"], "measured_hit_ms": row["hit_ms"]} if row else {}),
            }
        )
    return {**kind._asdict(), "check": check, "modelled": modelled}


def _checked(growth: Growth, work: Work, row: dict[str, Any]) -> dict[str, Any]:
    predicted = growth.predict(work)
    found: dict[str, Any] = {"length": row["length"]}
    for name in ("full", "hit"):
        found[f"{name}_ms"] = row[f"{name}_ms"]
        found[f"predicted_{name}_ms"] = predicted[name]
        found[f"{name}_error"] = predicted[name] / row[f"{name}_ms"] - 1
    return found


def _costs(model: str, engine: str, dtype: str) -> Any:
    from tailreplay.bench.ttft_needs import described
    from tailreplay.bench.ttft_plan import Target
    from tailreplay.engines.transformers.quiet import quiet_library

    quiet_library()
    shape, is_shape, _ = model.partition(" shape, random weights")
    return described(Target(shape, bool(is_shape), engine), dtype).costs


def _print_tables(found: dict[str, Any], fit_to: int) -> None:
    from rich.table import Table

    from tailreplay.commands.console import console

    title = f"{found['engine']}: {found['model']}, r = {found['ratio']:.0%}, {found['query']:,}-token query"
    table = Table(title=f"{title}; modelled, in ms, with what was measured in brackets")
    for name in ("prefix", "full", "hit", "speed-up", "lookup", "copy", "replay", "query", "host memory"):
        table.add_column(name, justify="right")
    for row in found["modelled"]:
        table.add_row(
            f"{row['length']:,}",
            _with(row, "full"),
            _with(row, "hit"),
            f"{row['speedup']:.1f}x",
            *(f"{row[f'{name}_ms']:.1f}" for name in ("lookup", "copy", "replay", "query")),
            format_bytes(row["host_bytes"]),
        )
    console().print(table)
    if found["check"]:
        table = Table(title=f"{title}; fitted up to {fit_to:,} tokens, against what was measured beyond")
        for name in ("prefix", "full ms", "predicted", "error", "hit ms", "predicted", "error"):
            table.add_column(name, justify="right")
        for row in found["check"]:
            cells = [f"{row['length']:,}"]
            for name in ("full", "hit"):
                cells += [
                    f"{row[f'{name}_ms']:.0f}",
                    f"{row[f'predicted_{name}_ms']:.0f}",
                    f"{row[f'{name}_error']:+.0%}",
                ]
            table.add_row(*cells)
        console().print(table)


def _with(row: dict[str, Any], name: str) -> str:
    measured = row.get(f"measured_{name}_ms")
    return f"{row[f'{name}_ms']:.0f}" + (f" ({measured:.0f})" if measured is not None else "")
