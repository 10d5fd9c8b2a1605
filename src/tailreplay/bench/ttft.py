"""Time to first token of a hit against a full prefill, in one process, beside the limit set by floating-point work."""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

from tailreplay.ablation import ABLATIONS
from tailreplay.bench.ttft_plan import Target, TtftPlan, parse_length, parse_ratio

_LENGTHS = [1024, 2048, 4096, 8192]
_SHAPE = "qwen3.5-0.8b"
_BUNDLED = "bundled"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    many: dict[str, Any] = {"nargs": "+", "action": "extend"}
    parser.add_argument("--model", **many, help="folders or hub ids")
    parser.add_argument(
        "--shape",
        **many,
        help="random weights in these shapes: qwen3.5-0.8b (default), qwen3.5-4b, qwen3.6-27b, olmo-hybrid-7b, tiny; "
        "bundled is the bundled model itself",
    )
    parser.add_argument(
        "--engine", **many, choices=["transformers", "vllm"], help="one or both (default: transformers)"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument(
        "--lengths", type=parse_length, nargs="+", default=_LENGTHS, help="matched tokens, like 4096 or 32K"
    )
    parser.add_argument(
        "--ratios", type=parse_ratio, nargs="+", default=[0.05], help="shares of the prefix to replay, like 5%% or 0.05"
    )
    parser.add_argument(
        "--ablations",
        nargs="+",
        choices=list(ABLATIONS),
        default=["both"],
        help="ways to carry a hit out: with the tail's feed-forward skip, copies overlapping replay, both (default), none",
    )
    parser.add_argument("--query", type=int, default=64, help="tokens after the matched prefix (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="hits of each kind (default: %(default)s)")
    parser.add_argument("--cold-repeats", type=int, help="full prefills a length (default: as many as --repeats)")
    parser.add_argument("--warmup", type=int, default=1, help="runs before those that count (default: %(default)s)")
    parser.add_argument("--host-bytes", help="limit of the cache (default: what the longest prefix needs)")
    parser.add_argument("--limits-only", action="store_true", help="print limits from the config; run no model")
    parser.add_argument("--save", type=Path, help="append each row to this file (JSON lines) as soon as it is measured")
    parser.add_argument(
        "--from", dest="saved", type=Path, nargs="+", help="measure nothing: report the rows of these files"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--html", type=Path, help="write the report with plots to this file, which needs no other")
    parser.add_argument("--png", type=Path, help="write the plots to this file")


def run(arguments: argparse.Namespace) -> int:
    """Measure and report; returns the exit status."""
    from tailreplay.bench import ttft_saved
    from tailreplay.bench.files import append, require_for, writable
    from tailreplay.bench.ttft_run import measure
    from tailreplay.errors import TailReplayError

    for path in filter(None, (arguments.html, arguments.png, arguments.save)):
        writable(path)
    require_for(pictures=bool(arguments.html or arguments.png), tables=not arguments.json)
    if arguments.saved:
        report(ttft_saved.report_of(ttft_saved.load(arguments.saved)), arguments)
        return 0
    plan = plan_of(arguments)
    plan.check()
    if arguments.limits_only:
        _limits(plan, arguments.json)
        return 0
    _check_targets(plan)
    records: list[dict[str, Any]] = []

    def keep(record: dict[str, Any]) -> None:
        records.append(record)
        if arguments.save:
            append(arguments.save, record)

    try:
        wrong = measure(plan, keep)
    finally:
        if records:  # also when it was stopped halfway
            report(ttft_saved.report_of(records), arguments)
    if wrong:
        raise TailReplayError(" ".join(wrong))
    return 0


def plan_of(arguments: argparse.Namespace) -> TtftPlan:
    """Return what the arguments ask for, unchecked."""
    shapes = arguments.shape or ([] if arguments.model else [_SHAPE])
    sources = [(name, name != _BUNDLED) for name in shapes] + [(name, False) for name in arguments.model or []]
    return TtftPlan(
        targets=tuple(
            dict.fromkeys(
                Target(source, is_shape, engine)
                for (source, is_shape), engine in product(sources, arguments.engine or ["transformers"])
            )
        ),
        lengths=tuple(dict.fromkeys(arguments.lengths)),
        ratios=tuple(dict.fromkeys(arguments.ratios)),
        ablations=tuple(name for name in ABLATIONS if name in arguments.ablations),
        dtype=arguments.dtype,
        query=arguments.query,
        repeats=arguments.repeats,
        cold_repeats=arguments.repeats if arguments.cold_repeats is None else arguments.cold_repeats,
        warmup=arguments.warmup,
        host_bytes=arguments.host_bytes,
    )


def report(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Print a report, then write the files that were asked for: those may still fail."""
    from tailreplay.bench import ttft_report
    from tailreplay.bench.files import writing

    if arguments.json:
        print(json.dumps(found, allow_nan=False), flush=True)
    else:
        from tailreplay.commands.console import console

        ttft_report.print_tables(console(), found)
    if arguments.png:
        with writing(arguments.png):
            arguments.png.write_bytes(ttft_report.picture(found["rows"], "png"))
    if arguments.html:
        with writing(arguments.html):
            ttft_report.write_html(found, arguments.html)
    if not arguments.json:
        for path in filter(None, (arguments.html, arguments.png)):
            print(f"written: {path}")


def _check_targets(plan: TtftPlan) -> None:
    """Refuse what cannot be measured here before anything is loaded."""
    from tailreplay.bench.traffic import vllm_version
    from tailreplay.bench.ttft_needs import check_fits, described
    from tailreplay.engines.transformers.quiet import quiet_library

    quiet_library()
    if any(target.engine == "vllm" for target in plan.targets):
        vllm_version()
    for target in plan.targets:
        check_fits(target, described(target, plan.dtype), plan)


def _limits(plan: TtftPlan, as_json: bool) -> None:
    from tailreplay.bench.ttft_limits import limits_of
    from tailreplay.bench.ttft_needs import described
    from tailreplay.engines.transformers.quiet import quiet_library

    quiet_library()
    sources = {target.source: target for target in plan.targets}.values()
    found = [limits_of(target, described(target, plan.dtype), plan) for target in sources]
    if as_json:
        print(json.dumps({"limits": found}))
        return
    from tailreplay.bench.ttft_report import print_limits
    from tailreplay.commands.console import console

    print_limits(console(), found)
