"""`tailreplay generate`: one prompt on the command line."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailreplay.engines.transformers.results import GenerationResult


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="tailreplay generate",
        description="Answer a prompt. With --then, further prompts follow in the same process and reuse the cache.",
    )
    parser.add_argument("model", nargs="?", default="bundled", help="hub id, folder, or 'bundled'")
    parser.add_argument("-p", "--prompt", help="the prompt; '-' or nothing reads standard input")
    parser.add_argument("-f", "--file", type=Path, help="put this file's text before the prompt")
    parser.add_argument(
        "--then", action="append", default=[], metavar="PROMPT", help="ask this next, after the same file"
    )
    parser.add_argument("--replay", default="0.05", help="ratio in (0, 1], 'exact', 'zero' or 'off'")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stop", action="append", help="end the answer before this text")
    parser.add_argument("--host-bytes", default="1GiB", help="size of the cache")
    parser.add_argument("--device", help="cpu, cuda, …")
    parser.add_argument("--json", action="store_true", help="print one JSON object a prompt")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Generate; returns the exit status."""
    from tailreplay.engines.transformers.quiet import quiet_library
    from tailreplay.modes import parse_replay

    reuse = parse_replay(replay_argument(arguments.replay))
    document, prompts = _prompts(arguments)
    quiet_library()
    from tailreplay.cache import PrefixCache
    from tailreplay.engines.transformers import HybridLM

    cache = PrefixCache(arguments.host_bytes)
    lm = HybridLM.from_pretrained(arguments.model, cache=cache, replay=reuse, device=arguments.device)
    settings = {
        name: getattr(arguments, name) for name in ("max_new_tokens", "temperature", "top_p", "top_k", "seed", "stop")
    }
    for prompt in prompts:
        stream = lm.stream(document + prompt, **settings)
        for piece in stream:
            if not arguments.json:
                print(piece, end="", flush=True)
        _show(stream.result, arguments.json)
    return 0


def replay_argument(text: str) -> Any:
    """Return a ratio if `text` is a number, else `text` itself (a mode, checked later)."""
    try:
        return float(text)
    except ValueError:
        return text


def _prompts(arguments: argparse.Namespace) -> tuple[str, list[str]]:
    from tailreplay.errors import InvalidRequestError

    document = ""
    if arguments.file is not None:
        try:
            document = arguments.file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f"The file '{arguments.file}' cannot be read as text: {error}") from error
    prompt = arguments.prompt
    if prompt is None or prompt == "-":
        # With a file and no prompt the file is the prompt, unless something is piped in.
        prompt = "" if arguments.prompt is None and document and sys.stdin.isatty() else sys.stdin.read()
    return document, [prompt, *arguments.then]


def _show(result: GenerationResult, as_json: bool) -> None:
    if as_json:
        print(
            json.dumps(
                {
                    "text": result.text,
                    "tokens": result.tokens,
                    "finish_reason": result.finish_reason,
                    "reuse": result.reuse.to_dict(),
                    "timings": result.timings.to_dict(),
                }
            )
        )
        return
    print()
    reuse = result.reuse
    reused = f"reused {reuse.matched} of {reuse.prompt_tokens} tokens, replayed {reuse.replayed}, {reuse.provenance}"
    missed = f"nothing reused of {reuse.prompt_tokens} tokens ({reuse.miss_reason})"
    print(
        f"[{reused if reuse.matched else missed}; first token after {result.timings.first_token * 1000:.0f} ms]",
        file=sys.stderr,
    )
