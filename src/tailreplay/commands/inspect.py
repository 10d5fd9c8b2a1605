"""`tailreplay inspect`: what a model would cost and gain, from its config alone."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from tailreplay.sizes import format_bytes

if TYPE_CHECKING:
    from tailreplay.engines.transformers.backbone import Backbone


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="tailreplay inspect",
        description="Groups, bytes a token and the speed limit of a hit, from config.json alone: no weights are read, "
        "unless --horizons asks what each head remembers.",
    )
    parser.add_argument("model", nargs="?", default="bundled", help="hub id, folder with a config.json, or 'bundled'")
    parser.add_argument("--ratio", type=float, default=0.05, help="share of the prefix to replay, in (0, 1]")
    parser.add_argument("--query", type=int, default=64, help="tokens after the matched prefix")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384, 32768, 131072])
    parser.add_argument("--dtype", help="count in this dtype, like bfloat16, instead of the config's own")
    parser.add_argument(
        "--horizons", action="store_true", help="run a text through the model: how long its heads remember"
    )
    parser.add_argument("--tokens", type=int, default=4096, help="length of the text for --horizons")
    parser.add_argument(
        "--tail", type=int, help="--horizons names heads that remember longer (default: what --ratio replays)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Describe the model; returns the exit status."""
    from tailreplay.engines.transformers.quiet import quiet_library
    from tailreplay.errors import InvalidRequestError

    if arguments.query < 1 or min(arguments.lengths) < 1:
        raise InvalidRequestError("Lengths and the query must be at least one token.")
    quiet_library()
    import torch

    from tailreplay.engines.transformers.describe import describe

    dtype = getattr(torch, arguments.dtype or "", None)
    if arguments.dtype and not isinstance(dtype, torch.dtype):
        raise InvalidRequestError(f"'{arguments.dtype}' is not a dtype: bfloat16, float16 or float32, say.")
    report = _report(describe(arguments.model, dtype), arguments)
    if arguments.horizons:
        from tailreplay.commands.inspect_horizons import horizons_report

        report["horizons"] = horizons_report(arguments, dtype)
    if arguments.json:
        print(json.dumps(report))
    else:
        _print(report)
    return 0


def _report(backbone: Backbone, arguments: argparse.Namespace) -> dict[str, Any]:
    from tailreplay.budget import Ratio

    topology, costs = backbone.topology, backbone.costs
    budget = Ratio(arguments.ratio)
    stored = iter(costs.hidden_bytes)
    groups = [
        {
            "source": "embedding" if group.source is None else f"layer {group.source}",
            "layers": list(group.layers),
            "stateful": len(group.stateful),
            "hidden_bytes_per_token": next(stored) if group.stores_hidden else 0,
            "receptive_field": group.receptive_field,
        }
        for group in topology.groups
    ]
    lengths = []
    for length in arguments.lengths:
        tails = [budget.tail(length, group) for group in topology.groups]
        full = costs.prefill_flops(0, length + arguments.query)
        hit = costs.hit_flops(length, length + arguments.query, tails)
        lengths.append(
            {
                "length": length,
                "replayed": max(tails, default=0),
                "full_flops": full,
                "hit_flops": hit,
                "limit": full / hit,
                "cached_bytes": length * costs.page_bytes_per_token,
                "loaded_bytes": costs.hit_bytes(length, tails),
            }
        )
    return {
        "model": str(arguments.model),
        "model_type": backbone.config.model_type,
        "dtype": str(backbone.model.dtype).removeprefix("torch."),
        "ratio": arguments.ratio,
        "query": arguments.query,
        "layers": len(topology.kinds),
        "attention_layers": list(topology.attention_layers),
        "groups": groups,
        "kv_bytes_per_token": costs.kv_bytes,
        "hidden_bytes_per_token": sum(costs.hidden_bytes),
        "state_bytes": costs.state_bytes,
        "lengths": lengths,
    }


def _print(report: dict[str, Any]) -> None:
    from rich.table import Table

    from tailreplay.commands.console import console

    out = console()
    out.print(
        f"[bold]{report['model']}[/bold] ({report['model_type']}, {report['dtype']}): {report['layers']} layers, "
        f"{len(report['attention_layers'])} of them full attention, {len(report['groups'])} groups"
    )
    if report["groups"]:
        table = Table(title="Groups (replayed independently)")
        for column in ("input", "layers", "with state", "hiddens a token", "exact tail"):
            table.add_column(column, justify="right")
        for group in report["groups"]:
            table.add_row(
                group["source"],
                f"{group['layers'][0]}-{group['layers'][-1]}",
                str(group["stateful"]),
                format_bytes(group["hidden_bytes_per_token"]),
                f"{group['receptive_field']} tokens" if group["receptive_field"] else "whole prefix",
            )
        out.print(table)
    else:
        out.print("No linear layers: the cache is a plain prefix cache, every hit is exact and nothing is replayed.")
    out.print(
        f"A token costs {format_bytes(report['kv_bytes_per_token'])} of keys and values and "
        f"{format_bytes(report['hidden_bytes_per_token'])} of hiddens; "
        f"one copy of the recurrent states is {format_bytes(report['state_bytes'])}."
    )
    table = Table(title=f"Hit at r = {report['ratio']:g} with a {report['query']}-token query, against full prefill")
    for column in ("prefix", "replayed", "full TFLOP", "hit TFLOP", "speed limit", "cached", "loaded by a hit"):
        table.add_column(column, justify="right")
    for row in report["lengths"]:
        table.add_row(
            f"{row['length']:,}",
            f"{row['replayed']:,}",
            f"{row['full_flops'] / 1e12:.4g}",
            f"{row['hit_flops'] / 1e12:.4g}",
            f"{row['limit']:.1f}x",
            format_bytes(row["cached_bytes"]),
            format_bytes(row["loaded_bytes"]),
        )
    out.print(table)
    if "horizons" in report:
        from tailreplay.commands.inspect_horizons import print_horizons

        print_horizons(report["horizons"])
    out.print("The limit counts floating-point operations only: a measured speed-up stays below it (see `bench ttft`).")
