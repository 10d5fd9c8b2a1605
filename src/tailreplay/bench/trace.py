"""A trace of many users against one server: requests arrive at a given rate, whether or not others were answered."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from tailreplay.bench.endpoint import Endpoint, check_url
from tailreplay.bench.files import require
from tailreplay.bench.patterns import FIRST_TOKEN, LAST_TOKEN
from tailreplay.bench.peers import SERVERS, add_server_arguments
from tailreplay.bench.report_files import add_file_arguments, check_files, options_of, write_files
from tailreplay.bench.trace_cache import cache_report, settled
from tailreplay.bench.trace_load import Load, Outcome
from tailreplay.bench.trace_plan import prepared
from tailreplay.bench.trace_report import OVER_TIME, lines, over_time, report
from tailreplay.bench.traces import GENERATORS
from tailreplay.errors import InvalidRequestError, TailReplayError
from tailreplay.evals.report.grids import Grid


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options to `parser`."""
    add = parser.add_argument
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="a running server with OpenAI's completions API")
    where.add_argument("--start", choices=SERVERS, help="start vLLM: no prefix cache, its own, tailreplay")
    add("--api-model", help="model name for --url (default: the server's first)")
    add(
        "--trace", default="mix", help=f"{', '.join(GENERATORS)}, or a file in Mooncake's format (default: %(default)s)"
    )
    add("--requests", type=int, default=100, help="of the trace (default: %(default)s)")
    add("--rate", type=float, default=1.0, help="arrivals a second (default: %(default)s)")
    add("--poisson", action="store_true", help="draw arrival times instead of stretching the trace's own")
    add("--concurrency", type=int, help="most requests under way at once (default: no limit)")
    add("--max-prompt", type=int, default=8000, help="tokens of the longest prompt and answer (default: %(default)s)")
    add("--vocabulary", type=int, default=LAST_TOKEN, help="token ids stay below this (default: %(default)s)")
    add("--seed", type=int, default=0, help="of made traces and --poisson (default: %(default)s)")
    add("--timeout", type=float, default=300, help="seconds a request may take (default: %(default)s)")
    add("--bucket", type=float, default=10.0, help="seconds of a line of the table over time (default: %(default)s)")
    add("--no-anchors", action="store_true", help="with --start tailreplay: let it save no states")
    add_server_arguments(parser)
    add_file_arguments(parser)
    add("--json", action="store_true", help="print one JSON object instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit status: 1 if there is no server or no request was answered."""
    check(arguments)
    requests = prepared(
        arguments.trace,
        arguments.requests,
        arguments.seed,
        arguments.max_prompt,
        arguments.vocabulary,
        arguments.rate,
        arguments.poisson,
    )
    outcomes: list[Outcome] = []
    held: dict[str, float] = {}
    status = 0

    async def measure(endpoint: Endpoint) -> None:
        async with endpoint:
            load = Load(endpoint, requests, arguments.concurrency, outcomes)
            _say(f"sending {len(requests)} requests over {requests[-1].at:.0f} s …")
            await load.run()
            held.update(await settled(endpoint, len(outcomes)))

    try:
        with tempfile.TemporaryDirectory() as folder, _server(arguments, Path(folder)) as endpoint:
            asyncio.run(measure(endpoint))
    except KeyboardInterrupt:
        status = 130
        _say("Interrupted: what was measured so far follows.")
    except TailReplayError as error:
        _say(f"tailreplay: {error}")
        return 1
    measured = {**report(outcomes, arguments.bucket), **cache_report(held)}
    _print(arguments, measured)
    return status or int(measured["errors"] == measured["requests"])


def check(arguments: argparse.Namespace) -> None:
    """Raise `InvalidRequestError` for numbers that cannot be measured with; one sentence."""
    require("httpx")
    for name in ("requests", "concurrency"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise InvalidRequestError(f"--{name.replace('_', '-')} must be at least 1, got {value}.")
    for name in ("rate", "bucket", "timeout"):
        if not 0 < getattr(arguments, name) < float("inf"):
            raise InvalidRequestError(f"--{name} must be a number above 0, got {getattr(arguments, name):g}.")
    check_files(arguments)
    if arguments.max_prompt < 64:
        raise InvalidRequestError(f"--max-prompt must be at least 64, got {arguments.max_prompt}.")
    if arguments.vocabulary <= FIRST_TOKEN:
        raise InvalidRequestError(f"--vocabulary must be more than {FIRST_TOKEN}, got {arguments.vocabulary}.")
    if arguments.no_anchors and arguments.start != "tailreplay":
        raise InvalidRequestError("--no-anchors goes with --start tailreplay only.")
    if arguments.url is not None:
        if not arguments.url.startswith(("http://", "https://")):
            raise InvalidRequestError(f"--url must be http://…, got {arguments.url!r}.")
        check_url(arguments.url)
    if arguments.trace not in GENERATORS and not Path(arguments.trace).is_file():
        raise InvalidRequestError(
            f"--trace must be one of {', '.join(GENERATORS)}, or a file in Mooncake's format, got {arguments.trace!r}."
        )


def _server(arguments: argparse.Namespace, folder: Path) -> AbstractContextManager[Endpoint]:
    if arguments.url is not None:
        return nullcontext(Endpoint("the server", arguments.url, arguments.api_model, arguments.timeout))
    from tailreplay.bench.started import started
    from tailreplay.bench.traffic import served_model

    _say(f"starting vLLM ({arguments.start}) …")
    settings = {"anchor_bytes": 0} if arguments.no_anchors else None
    return started(arguments, arguments.start, served_model(arguments, folder), arguments.max_prompt + 1, settings)


def _print(arguments: argparse.Namespace, measured: dict[str, Any]) -> None:
    from tailreplay.bench.trace_picture import draw

    title = f"{arguments.trace} at {arguments.rate:g} requests/s, {arguments.start or arguments.url}"
    overall = Grid("Overall", ("", ""), tuple(lines(measured)))
    by_time = Grid("Over time", OVER_TIME, tuple(over_time(measured)))
    # First what a person waits for: a file may still fail.
    if arguments.json:
        print(json.dumps({"options": options_of(arguments), **measured}))
    else:
        _print_tables(title, (overall, by_time), measured["errors_by_message"])
    write_files(
        arguments,
        title,
        [overall, by_time],
        lambda figure: draw(figure, measured),
        "Over time: median time to first token, shares of prompt tokens reused, requests sent and failed",
    )


def _print_tables(title: str, grids: Sequence[Grid], errors: dict[str, int]) -> None:
    from rich.table import Table

    from tailreplay.commands.console import console

    for grid in grids:
        made = Table(title=f"{title}: {grid.title.lower()}", show_header=any(grid.headings))
        for heading in grid.headings:
            made.add_column(heading, justify="right" if heading else "left")
        for line in grid.rows:
            made.add_row(*line)
        console().print(made)
    for message, count in errors.items():
        print(f"{count} failed: {message}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
