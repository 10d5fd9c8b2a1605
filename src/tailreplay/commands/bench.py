"""`tailreplay bench`: one benchmark a sub-command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

# Each is a module of `tailreplay.bench` with `add_arguments(parser)` and `run(args)`, loaded only when it is called.
BENCHMARKS = {
    "adaptive": "adaptive budgets against ratios that replay as many tokens: state errors and NLL",
    "capture": "what storing pages costs prefill and decode",
    "catalog": "look-up times and memory of the catalog, without a model",
    "codecs": "coding of page parts: bytes, speed, error, and what it does to replayed states",
    "disk": "pages a second of the disk cache against plain files, and how long it takes to open",
    "eviction": "what eviction policies hit, by replaying traces through the catalog, without a model",
    "growth": "how times and memory grow to a million tokens, modelled from what `ttft` has measured",
    "partial_anchors": "anchors that keep only heads that hardly forget: bytes, state error and NLL",
    "peers": "tokens reused on vLLM without a prefix cache, with its own, with tailreplay, and on other servers",
    "kernels": "CPU kernels of the gated delta rule against the library's own functions",
    "policies": "ten turns after an approximate hit, by policy of reusing approximate pages",
    "starts": "how a hit's tail should start: quality, operations and bytes by start, budget and anchor",
    "storage": "bytes a token by codec, how fast each tier hands pages over, and what a hit waits for",
    "trace": "a trace of many users at a given rate against one server: latencies, throughput, hits over time",
    "ttft": "time to first token with and without the cache",
    "traffic": "vLLM: throughput with and without the connector, and how a hit holds up running streams",
}


class _BenchmarkParser(argparse.ArgumentParser):
    """Parser of one benchmark, which gets its options when the benchmark is chosen: `ttft` needs torch for them."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        _module(self.prog.split()[-1]).add_arguments(self)
        return super().parse_known_args(args, namespace)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    made = argparse.ArgumentParser(prog="tailreplay bench", description="Measure parts of the cache.")
    benchmarks = made.add_subparsers(
        dest="benchmark", required=True, metavar="BENCHMARK", parser_class=_BenchmarkParser
    )
    for name, text in BENCHMARKS.items():
        benchmarks.add_parser(name, help=text, description=text)
    return made


def run(args: argparse.Namespace) -> int:
    """Run the chosen benchmark; returns the exit status."""
    status: int = _module(args.benchmark).run(args)
    return status


def _module(name: str) -> ModuleType:
    return import_module(f"tailreplay.bench.{name}")
