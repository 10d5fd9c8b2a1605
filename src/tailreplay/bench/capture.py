"""What capturing costs: the same prompts computed with and without storing pages, in turn, in one process."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from tailreplay.bench.files import require_for
from tailreplay.bench.overhead import unique_prompts
from tailreplay.bench.ttft_plan import Target
from tailreplay.errors import InvalidRequestError

if TYPE_CHECKING:
    from tailreplay.engines.transformers.backbone import Backbone

# What capture may cost, as a share of the time without it.
TARGET = 0.03
_DECODE_PROMPT = 32
Timed = Callable[[list[list[int]], int, bool], float]
"""Seconds to run prompts together and sample so many tokens after each, capturing or not."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options to `parser`."""
    parser.add_argument("--engine", default="transformers", choices=["transformers", "vllm"])
    parser.add_argument(
        "--shape", default="qwen3.5-0.8b", help="random weights in this shape, or bundled (default: %(default)s)"
    )
    parser.add_argument("--model", help="a folder, a hub id or 'bundled' instead of a shape")
    parser.add_argument("--prompt", type=int, default=2048, help="prefill: tokens (default: %(default)s)")
    parser.add_argument("--generate", type=int, default=64, help="decode: tokens (default: %(default)s)")
    parser.add_argument(
        "--concurrency", type=int, default=8, help="decode: requests at once, vllm only (default: %(default)s)"
    )
    parser.add_argument("--pairs", type=int, default=7, help="times each is measured (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    for name in ("prompt", "generate", "concurrency", "pairs"):
        if getattr(arguments, name) < 1:
            raise InvalidRequestError(f"--{name} must be at least 1, got {getattr(arguments, name)}.")
    require_for(pictures=False, tables=not arguments.json)
    target = target_of(arguments)
    longest = max(arguments.prompt + 1, _DECODE_PROMPT + arguments.generate)
    model = checked(target, longest)
    with tempfile.TemporaryDirectory() as folder:
        if target.engine == "vllm":
            from tailreplay.bench.capture_vllm import timed_engine

            timed = timed_engine(target, model, longest, arguments.concurrency, Path(folder))
        else:
            timed = _transformers(target)
        rows = measure(timed, arguments)
    report = {
        "model": target.name,
        "engine": arguments.engine,
        "machine": platform.processor() or platform.machine(),
        "target": TARGET,
        "rows": rows,
    }
    if arguments.json:
        print(json.dumps(report))
    else:
        _print_table(report)
    return 0


def target_of(arguments: argparse.Namespace) -> Target:
    """Return the model and engine that the arguments name."""
    source = arguments.model or arguments.shape
    return Target(source, arguments.model is None and source != "bundled", arguments.engine)


def checked(target: Target, longest: int) -> Backbone:
    """Return the target's model on the meta device; refuse what cannot be measured before weights are made or read.

    Raises
    ------
    InvalidRequestError
        If there is no such shape, or the model takes less than `longest` tokens.
    TailReplayError
        If there is no such model, or no vLLM to measure it on.
    """
    from tailreplay.bench.traffic import vllm_version
    from tailreplay.bench.ttft_needs import described
    from tailreplay.engines.transformers.quiet import quiet_library

    quiet_library()
    if target.engine == "vllm":
        vllm_version()
    model = described(target, "bfloat16")
    if model.max_tokens is not None and longest > model.max_tokens:
        raise InvalidRequestError(
            f"The model '{target.source}' takes at most {model.max_tokens:,} tokens, and a prompt with its answer has "
            f"{longest:,}: give a smaller --prompt or --generate."
        )
    return model


def measure(timed: Timed, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Time both kinds of work in pairs and return one row each; the first pair warms up."""
    many = arguments.concurrency if arguments.engine == "vllm" else 1
    kinds = {"prefill": (1, arguments.prompt, 1), "decode": (many, _DECODE_PROMPT, arguments.generate)}
    rows = []
    for seed, (kind, (requests, tokens, generate)) in enumerate(kinds.items()):
        pairs = []
        for turn in range(arguments.pairs + 1):
            prompts = unique_prompts(1000 * (seed + 1) + turn, requests, tokens)
            order = (False, True) if turn % 2 else (True, False)
            pair = {capturing: timed(prompts, generate, capturing) for capturing in order}
            print(f"{kind}: {pair[False]:.3f} s, capturing {pair[True]:.3f} s", file=sys.stderr, flush=True)
            if turn:
                pairs.append((pair[False], pair[True]))
        rows.append({"measure": kind, "requests": requests, "tokens": tokens + generate, **_row(pairs)})
    return rows


def _row(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    shares = [capturing / plain - 1 for plain, capturing in pairs]
    return {
        "plain_ms": 1000 * median(plain for plain, _ in pairs),
        "capturing_ms": 1000 * median(capturing for _, capturing in pairs),
        "cost": median(shares),
        "cost_min": min(shares),
        "cost_max": max(shares),
        "pairs": len(pairs),
    }


def _transformers(target: Target) -> Timed:
    import time

    from tailreplay.bench.shapes import random_model
    from tailreplay.cache import PrefixCache
    from tailreplay.engines.transformers import HybridLM

    # Room that the warm-up fills: memory that was never written costs a page fault more, which is soon over.
    cache = PrefixCache("64MiB")
    if target.is_shape:
        lm = HybridLM(random_model(target.source), cache=cache)
    else:
        lm = HybridLM.from_pretrained(target.source, cache=cache)

    def timed(prompts: list[list[int]], generate: int, capturing: bool) -> float:
        begin = time.perf_counter()
        for ids in prompts:
            lm.generate(ids, max_new_tokens=generate, replay="off", store=capturing, ignore_eos=True)
        return time.perf_counter() - begin

    return timed


def _print_table(report: dict[str, Any]) -> None:
    from rich.table import Table

    from tailreplay.commands.console import console

    table = Table(title=f"{report['engine']}: {report['model']}; what capturing costs")
    for column in ("", "requests", "tokens each", "plain ms", "capturing ms", "cost", "single pairs", "target"):
        table.add_column(column, justify="right")
    for row in report["rows"]:
        table.add_row(
            row["measure"],
            str(row["requests"]),
            str(row["tokens"]),
            f"{row['plain_ms']:.0f}",
            f"{row['capturing_ms']:.0f}",
            f"{row['cost']:+.1%}",
            f"{row['cost_min']:+.1%} to {row['cost_max']:+.1%}, {row['pairs']}",
            f"< {TARGET:.0%} {'met' if row['cost'] < TARGET else 'missed'}",
        )
    console().print(table)
