"""Time to first token of a hit against a full prefill, in one process, beside the limit set by floating-point work."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailreplay.engines.transformers import HybridLM


PHASES = ("lookup_ms", "copy_ms", "replay_ms", "query_ms", "loaded_mib")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--shape", default="qwen3.5-0.8b", help="random weights in this shape (qwen3.5-0.8b, tiny)")
    parser.add_argument("--model", help="a folder or hub id instead of a shape")
    parser.add_argument("--engine", default="transformers", choices=["transformers", "vllm"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="matched tokens")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.05], help="shares of the prefix to replay")
    parser.add_argument("--query", type=int, default=64, help="tokens after the matched prefix")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--host-bytes", default="2GiB")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    import torch

    _check_shape(arguments)
    if arguments.engine == "vllm":
        from tailreplay.bench.ttft_vllm import measure

        rows = measure(arguments)
    else:
        lm = _load(arguments)
        rows = []
        for length in arguments.lengths:
            for ratio in arguments.ratios:
                print(f"measuring {length} tokens at r = {ratio:g} …", file=sys.stderr, flush=True)
                rows.append(_measure(lm, arguments, length, ratio))
            lm.cache.clear()
    name = arguments.model or f"{arguments.shape} shape, random weights"
    report = {
        "model": name,
        "engine": arguments.engine,
        "dtype": arguments.dtype,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "query": arguments.query,
        "repeats": arguments.repeats,
        "rows": [{"model": name, "engine": arguments.engine, **row} for row in rows],
    }
    if arguments.json:
        print(json.dumps(report))
    else:
        _print_table(report)
    return 0


def _check_shape(arguments: argparse.Namespace) -> None:
    from tailreplay.bench.shapes import SHAPES
    from tailreplay.errors import InvalidRequestError

    if not arguments.model and arguments.shape not in SHAPES:
        raise InvalidRequestError(f"Unknown shape {arguments.shape!r}; known are {', '.join(SHAPES)}.")


def _load(arguments: argparse.Namespace) -> HybridLM:
    import torch

    from tailreplay.cache import PrefixCache
    from tailreplay.engines.transformers import HybridLM

    cache = PrefixCache(arguments.host_bytes)
    dtype = getattr(torch, arguments.dtype)
    if arguments.model:
        return HybridLM.from_pretrained(arguments.model, cache=cache, dtype=dtype)
    from tailreplay.bench.shapes import random_model

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return HybridLM(random_model(arguments.shape, dtype).to(device), cache=cache)


def _measure(lm: HybridLM, arguments: argparse.Namespace, length: int, ratio: float) -> dict[str, Any]:
    """Store a prefix, then time full prefills and hits in turn, so that drift of the machine meets both."""
    import torch

    generator = torch.Generator().manual_seed(length)
    vocabulary = lm.model.get_input_embeddings().num_embeddings
    ids = torch.randint(3, vocabulary, (length + arguments.query,), generator=generator).tolist()
    lm.generate(ids[:length], max_new_tokens=1, replay="off")
    full, hits = [], []
    for turn in range(arguments.warmup + arguments.repeats):
        cold = lm.generate(ids, max_new_tokens=1, replay="off", store=False)
        hit = lm.generate(ids, max_new_tokens=1, replay=ratio, store=False)
        if hit.reuse.matched < length:
            raise RuntimeError(f"expected a hit of {length} tokens, got {hit.reuse}")
        if turn >= arguments.warmup:
            full.append(cold.timings)
            hits.append(hit.timings)
    costs = lm.backbone.costs
    tails = [hit.reuse.replayed] * len(lm.backbone.topology.groups)
    row: dict[str, Any] = {
        "length": length,
        "ratio": ratio,
        "matched": hit.reuse.matched,
        "replayed": hit.reuse.replayed,
    }
    row["full_ms"] = _median_ms([timings.first_token for timings in full])
    row["hit_ms"] = _median_ms([timings.first_token for timings in hits])
    row["speedup"] = row["full_ms"] / row["hit_ms"]
    row["limit"] = costs.prefill_flops(0, len(ids)) / costs.hit_flops(hit.reuse.matched, len(ids), tails)
    row["loaded_mib"] = costs.hit_bytes(hit.reuse.matched, tails) / 2**20
    for phase in ("lookup", "copy", "replay", "prefill"):
        name = "query" if phase == "prefill" else phase
        row[f"{name}_ms"] = _median_ms([getattr(timings, phase) for timings in hits])
    return row


def _median_ms(seconds: list[float]) -> float:
    return round(1000 * statistics.median(seconds), 3)


def _print_table(report: dict[str, Any]) -> None:
    from rich.table import Table

    from tailreplay.commands.console import console

    title = (
        f"{report['engine']}: {report['model']}, {report['dtype']}, {report['device']}, {report['threads']} threads, "
        f"{report['query']}-token query, medians of {report['repeats']}"
    )
    table = Table(title=title)
    columns = [
        "prefix",
        "r",
        "full ms",
        "hit ms",
        "speed-up",
        "FLOP limit",
        "lookup",
        "copy",
        "replay",
        "query",
        "MiB loaded",
    ]
    for column in columns:
        table.add_column(column, justify="right")
    for row in report["rows"]:
        table.add_row(
            str(row["length"]),
            f"{row['ratio']:.0%}",
            f"{row['full_ms']:.0f}",
            f"{row['hit_ms']:.0f}",
            f"{row['speedup']:.1f}x",
            f"{row['limit']:.1f}x",
            *(f"{row[name]:.1f}" if name in row else "" for name in PHASES),
        )
    console().print(table)
