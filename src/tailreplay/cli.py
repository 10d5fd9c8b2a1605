"""The `tailreplay` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from tailreplay import __version__, torchvision_shim
from tailreplay.commands.bench import BENCHMARKS
from tailreplay.errors import TailReplayError

# Each command is a module with `parser()` and `run(arguments)`, loaded only when it is called.
COMMANDS = {
    "serve": "OpenAI-compatible server with a prefix cache",
    "generate": "answer one prompt, twice if asked, and show what was reused",
    "inspect": "groups, bytes a token and the speed limit of a model, from its config alone",
    "cache": "what the disk cache holds: list, count, verify, prune, export, import",
    "demo": "a long document and several questions: full, zero, replay and exact side by side",
    "eval": "what share of quality a hit keeps, by method, task and length",
    "bench": f"benchmarks: {', '.join(sorted(BENCHMARKS))}",
    "lm-eval": "what reuse does to a model's answers, on lm-evaluation-harness' tasks",
    "doctor": "what is installed, and what will not work with it",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status. Errors are one sentence on stderr and status 2."""
    # Before torch is loaded: idle OpenMP threads that spin slow a machine of few cores down.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    torchvision_shim.install()
    parser = argparse.ArgumentParser(
        prog="tailreplay",
        description="Token-level prefix caching for hybrid LLMs.",
        epilog="commands:\n" + "\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tailreplay {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the commands below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="…", help="see: tailreplay COMMAND --help")
    own, extra = _split(sys.argv[1:] if argv is None else list(argv))
    if not own:
        parser.print_help()
        return 2
    chosen = parser.parse_args(own)
    if extra and chosen.command != "serve":
        parser.error("arguments after -- are for 'serve --engine vllm' only")
    try:
        command = import_module(f"tailreplay.commands.{chosen.command.replace('-', '_')}")
        status: int = command.run(command.parser().parse_args(chosen.arguments, argparse.Namespace(extra=extra)))
    except TailReplayError as error:
        print(f"tailreplay: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(
            f"tailreplay: '{chosen.command}' needs the package '{error.name}': pip install 'tailreplay[transformers]'.",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        return 130
    return status


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Cut at the first ``--``: what comes after is for another program."""
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


if __name__ == "__main__":
    sys.exit(main())
