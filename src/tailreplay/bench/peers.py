"""The same prompts through vLLM without a prefix cache, with its own, with tailreplay, and through any other server."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from tailreplay.bench.endpoint import Endpoint, check_url
from tailreplay.bench.files import append, require
from tailreplay.bench.patterns import PATTERNS, Draw, longest
from tailreplay.bench.peers_table import HEADINGS, rows_of, table
from tailreplay.bench.report_files import add_file_arguments, check_files, options_of, write_files
from tailreplay.bench.wording import TokenIds, Wording, Words
from tailreplay.errors import InvalidRequestError, TailReplayError

SERVERS = ("none", "own", "tailreplay")
RESTARTED = "restarted"
_DISK = "8GiB"
_TITLE = "Prompt tokens reused, of those that an ideal cache would have; ms to the first token"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options to `parser`."""
    parser.add_argument(
        "--servers",
        nargs="*",
        choices=[*SERVERS, RESTARTED],
        help="what to start on vLLM, one after another: no prefix cache, vLLM's own, tailreplay (default: these, or none "
        "of them with --url); or tailreplay over a disk, ended after all patterns, started anew, and asked all again",
    )
    parser.add_argument(
        "--url", action="append", default=[], metavar="NAME=URL", help="a running server; may be repeated"
    )
    parser.add_argument("--api-model", help="model name for --url (default: the server's first)")
    parser.add_argument("--text", action="store_true", help="text prompts, for servers that take no token ids")
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, metavar="PATTERN", help=", ".join(PATTERNS))
    parser.add_argument(
        "--repeats", type=int, default=1, help="of each pattern, with new tokens (default: %(default)s)"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies all lengths (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds a request may take (default: %(default)s)")
    add_server_arguments(parser)
    parser.add_argument("--save", metavar="FILE", help="append what was measured, a JSON line a pattern, as it comes")
    add_file_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of servers that the benchmark starts itself."""
    parser.add_argument("--model", default="bundled", help="a folder or hub id (default: %(default)s)")
    parser.add_argument("--shape", help="random weights in this shape instead of a model (qwen3.5-0.8b)")
    parser.add_argument("--host-bytes", default="4GiB", help="limit of tailreplay's cache (default: %(default)s)")
    parser.add_argument("--server-arg", action="append", default=[], help="one more argument for vLLM; may be repeated")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit status, 1 if a server failed."""
    others = check(arguments)
    records: list[dict[str, Any]] = []
    status = 0
    names = SERVERS if arguments.servers is None and not others else arguments.servers or ()
    with tempfile.TemporaryDirectory() as folder:
        model = _prepared(arguments, Path(folder)) if names else ""
        for name, url in [*((name, None) for name in names), *others.items()]:
            try:
                if name == RESTARTED:
                    _restart(arguments, model, records)
                    continue
                with _server(arguments, name, url, model) as endpoint:
                    asyncio.run(_measure(arguments, endpoint, _wording(arguments, endpoint), records))
            except KeyboardInterrupt:
                status = 130
                _say("Interrupted: what was measured so far follows.")
                break
            except TailReplayError as error:
                status = 1
                _say(f"tailreplay: {name}: {error}")
    _print(arguments, records)
    return status


def check(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the servers of ``--url`` by name; raise `InvalidRequestError` for what cannot be measured with."""
    require("httpx")
    for name in ("repeats", "max_tokens"):
        if getattr(arguments, name) < 1:
            raise InvalidRequestError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(arguments, name)}.")
    for name in ("scale", "timeout"):
        if not 0 < getattr(arguments, name) < float("inf"):
            raise InvalidRequestError(f"--{name} must be a number above 0, got {getattr(arguments, name):g}.")
    others: dict[str, str] = {}
    for given in arguments.url:
        name, _, url = given.partition("=")
        if not name or not url.startswith(("http://", "https://")):
            raise InvalidRequestError(f"--url must be NAME=http://…, got {given!r}.")
        if name in others or name in (*SERVERS, RESTARTED):
            raise InvalidRequestError(f"--url {given!r}: the name {name!r} is taken.")
        check_url(url)
        others[name] = url
    if arguments.servers == [] and not others:
        raise InvalidRequestError("There is nothing to measure: name --servers, or give --url.")
    check_files(arguments, "save")
    return others


def _prepared(arguments: argparse.Namespace, folder: Path) -> str:
    """Return the folder of the model for the servers that are started, checked against the longest prompt."""
    from tailreplay.bench.traffic import served_model

    model = served_model(arguments, folder)
    needed = _longest(arguments)
    config = Path(model) / "config.json"
    limit = json.loads(config.read_text()).get("max_position_embeddings") if config.exists() else None
    if limit is not None and needed > limit:
        raise InvalidRequestError(
            f"The longest prompt and its answer are {needed:,} tokens, the model takes {limit:,}: use a smaller --scale."
        )
    return model


def _longest(arguments: argparse.Namespace) -> int:
    chosen = arguments.patterns or PATTERNS
    return max(longest(PATTERNS[name](Draw(0, 0, arguments.scale)), arguments.max_tokens) for name in chosen) + 1


def _server(arguments: argparse.Namespace, name: str, url: str | None, model: str) -> AbstractContextManager[Endpoint]:
    if url is not None:
        return nullcontext(Endpoint(name, url, arguments.api_model, arguments.timeout))
    from tailreplay.bench.started import started

    _say(f"starting vLLM ({name}) …")
    return started(arguments, name, model, _longest(arguments))


def _wording(arguments: argparse.Namespace, endpoint: Endpoint) -> Wording:
    return Words(endpoint) if arguments.text else TokenIds()


def _restart(arguments: argparse.Namespace, model: str, records: list[dict[str, Any]]) -> None:
    """Ask all patterns twice, of two servers over the same disk; the second time counts."""
    from tailreplay.bench.started import started

    wording = TokenIds()
    with tempfile.TemporaryDirectory() as disk:
        settings = {"tiers": [f"disk:{disk}?limit={_DISK}"]}
        for time in ("first", "second"):
            _say(f"starting vLLM ({RESTARTED}, {time} time) …")
            with started(arguments, RESTARTED, model, _longest(arguments), settings) as endpoint:
                asyncio.run(_measure(arguments, endpoint, wording, records if time == "second" else None))


async def _measure(
    arguments: argparse.Namespace, endpoint: Endpoint, wording: Wording, records: list[dict[str, Any]] | None
) -> None:
    """Append what is measured to `records`, and to the file of ``--save``; None only asks."""
    from tailreplay.bench.peers_run import measure_server

    patterns = list(arguments.patterns or PATTERNS)
    async with endpoint:
        async for record in measure_server(
            endpoint, patterns, arguments.repeats, arguments.seed, arguments.scale, arguments.max_tokens, wording
        ):
            _say(f"{endpoint.name}: {record['pattern']}")
            if records is None:
                continue
            records.append(record)
            if arguments.save:
                append(Path(arguments.save), record)


def _print(arguments: argparse.Namespace, records: list[dict[str, Any]]) -> None:
    from tailreplay.bench.peers_picture import draw
    from tailreplay.evals.report.grids import Grid

    rows = rows_of(records)
    lines = table(rows)
    notes = {record["server"]: record["note"] for record in records if record["note"]}
    # First what a person waits for: a file may still fail.
    if arguments.json:
        print(json.dumps({"options": options_of(arguments), "rows": rows, "notes": notes, "records": records}))
    elif rows:
        _print_table(lines, notes)
    write_files(
        arguments,
        "Prefix caches side by side",
        [Grid(_TITLE, HEADINGS, tuple(lines))],
        lambda figure: draw(figure, rows),
        "By pattern and server: the share of reusable tokens that was reused, and the median time to first token",
    )


def _print_table(lines: list[tuple[str, ...]], notes: dict[str, str]) -> None:
    from rich.table import Table

    from tailreplay.commands.console import console

    made = Table(title=_TITLE)
    for at, heading in enumerate(HEADINGS):
        made.add_column(heading, justify="left" if at < 2 else "right", no_wrap=True)
    for line in lines:
        made.add_row(*line)
    console().print(made)
    for name, note in notes.items():
        print(f"{name}: {note}.")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
