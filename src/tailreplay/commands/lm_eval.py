"""`tailreplay lm-eval`: what reuse does to a model's answers, on lm-evaluation-harness' tasks."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailreplay.errors import InvalidRequestError, TailReplayError

if TYPE_CHECKING:
    from tailreplay.evals.lm_eval.methods import Method
    from tailreplay.evals.lm_eval.report import Outcome
    from tailreplay.evals.lm_eval.sizing import Sizing
    from tailreplay.evals.lm_eval.tasks import LoadedTasks


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="tailreplay lm-eval",
        description="Run lm-evaluation-harness tasks: each prompt's context is cached, and its question comes after a hit.",
    )
    parser.add_argument("--model", default="bundled", help="hub id, folder, or 'bundled'")
    parser.add_argument("--tasks", nargs="+", required=True, metavar="TASK", help="names, groups or YAML files; or a,b")
    parser.add_argument("--method", nargs="+", default=["full", "replay"], help="of full, zero, replay and exact")
    parser.add_argument("--ratio", nargs="+", type=float, help="of replay, in (0, 1]; 0.05 if not given")
    parser.add_argument("--min-tail", type=int, default=0, help="shortest tail of replay (default: %(default)s)")
    parser.add_argument("--query-tokens", type=int, default=64, help="query of tasks without a rule of their own")
    parser.add_argument("--limit", type=float, help="samples a task, or a share of them below 1")
    parser.add_argument("--num-fewshot", type=int, help="examples before each question")
    parser.add_argument("--max-seq-lengths", nargs="+", type=int, metavar="N", help="lengths of RULER's prompts")
    parser.add_argument("--metadata", default="{}", metavar="JSON", help="more for tasks that make their data")
    parser.add_argument("--include-path", metavar="DIR", help="folder with tasks of your own")
    parser.add_argument(
        "--gen-kwargs", default="{}", metavar="JSON", help='generation settings, like {"max_gen_toks": 32}'
    )
    parser.add_argument("--max-length", type=int, help="longest prompt and answer; the model's limit if not given")
    parser.add_argument("--apply-chat-template", action="store_true")
    parser.add_argument("--thinking", action=argparse.BooleanOptionalAction, help="goes to the chat template")
    parser.add_argument("--device", help="cpu, cuda, …")
    parser.add_argument("--dtype", default="auto", help="bfloat16, float32, …; the checkpoint's own if not given")
    parser.add_argument("--host-bytes", help="size of the cache; room for one context if not given")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write everything there")
    parser.add_argument("--log-samples", action="store_true", help="with every prompt and answer")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Evaluate; returns the exit status. Everything that can be refused is, before the model is loaded."""
    if find_spec("lm_eval") is None:
        raise TailReplayError("lm-eval is not installed: pip install 'tailreplay[eval]'.")
    metadata, gen_kwargs = _json("metadata", arguments.metadata), _json("gen-kwargs", arguments.gen_kwargs)
    if arguments.max_seq_lengths:
        metadata["max_seq_lengths"] = arguments.max_seq_lengths
    for name in ("query_tokens", "limit"):
        if getattr(arguments, name) is not None and getattr(arguments, name) <= 0:
            raise InvalidRequestError(f"--{name.replace('_', '-')} must be above 0, got {getattr(arguments, name):g}.")
    _quiet()
    from tailreplay.commands.console import console
    from tailreplay.evals.lm_eval.methods import parse_methods
    from tailreplay.evals.lm_eval.table import check_writable, table_of, write_json

    methods = parse_methods(arguments.method, arguments.ratio, arguments.min_tail)
    if arguments.output is not None:
        check_writable(arguments.output)
    sizing = _sizing(arguments, metadata)
    tasks = _tasks(arguments, metadata, gen_kwargs, sizing)
    outcomes = _outcomes(arguments, methods, tasks, gen_kwargs, sizing)
    console().print(table_of(arguments.model, outcomes))
    if arguments.output is not None:
        write_json(arguments.output, arguments.model, outcomes)
    return 0


def _json(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidRequestError(f"--{name} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise InvalidRequestError(f"--{name} must be a JSON object, like {{}}, got {text}.")
    return value


def _quiet() -> None:
    """Keep the libraries' notices out of the output, and their progress bars where nobody watches."""
    watched = sys.stderr.isatty()
    if not watched:
        # Read when tqdm is imported, which the next import does.
        os.environ.setdefault("TQDM_DISABLE", "1")
    import datasets

    from tailreplay.engines.transformers.quiet import quiet_library

    quiet_library()
    if not watched:
        datasets.disable_progress_bars()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)


def _remote(arguments: argparse.Namespace) -> dict[str, bool]:
    return {"trust_remote_code": True} if arguments.trust_remote_code else {}


def _sizing(arguments: argparse.Namespace, metadata: dict[str, Any]) -> Sizing:
    """Look at the model's config, and hold the lengths against it."""
    from tailreplay.engines.transformers.devices import usable_device
    from tailreplay.evals.lm_eval.sizing import size_up

    usable_device(arguments.device)
    sizing = size_up(arguments.model, arguments.max_length, arguments.host_bytes, arguments.dtype, **_remote(arguments))
    lengths = metadata.get("max_seq_lengths", [])
    if not isinstance(lengths, list) or not all(isinstance(length, int) and length > 0 for length in lengths):
        raise InvalidRequestError(f"max_seq_lengths must be a list of lengths in tokens, got {lengths!r}.")
    if lengths and max(lengths) > sizing.max_length:
        raise InvalidRequestError(
            f"Length {max(lengths)} is above the {sizing.max_length} tokens that the model takes here."
        )
    return sizing


def _tasks(
    arguments: argparse.Namespace, metadata: dict[str, Any], gen_kwargs: dict[str, Any], sizing: Sizing
) -> LoadedTasks:
    """Load the tasks, and refuse those that cannot be run."""
    from tailreplay.evals.lm_eval.requests import DEFAULT_ANSWER_TOKENS, answering
    from tailreplay.evals.lm_eval.tasks import load_tasks
    from tailreplay.loading import model_path

    names = [name for given in arguments.tasks for name in given.split(",") if name]
    # RULER makes prompts of a wanted length, for which it needs the tokenizer.
    metadata = {"tokenizer": model_path(arguments.model), **metadata}
    loaded = load_tasks(names, arguments.include_path, metadata)
    for name, task in loaded.tasks.items():
        if task.OUTPUT_TYPE == "generate_until":
            settings = {**(task.get_config("generation_kwargs") or {}), **gen_kwargs}
            answering(name, settings, DEFAULT_ANSWER_TOKENS, sizing.max_length)
    return loaded


def _outcomes(
    arguments: argparse.Namespace,
    methods: list[Method],
    tasks: LoadedTasks,
    gen_kwargs: dict[str, Any],
    sizing: Sizing,
) -> list[Outcome]:
    """Load the model and run one method after another."""
    from tailreplay.cache import PrefixCache
    from tailreplay.engines.transformers import HybridLM
    from tailreplay.evals.lm_eval.compare import Options, evaluate
    from tailreplay.storage import Storage

    lm = HybridLM.from_pretrained(
        arguments.model,
        cache=PrefixCache(sizing.host_bytes, storage=Storage(anchor_bytes=0)),
        device=arguments.device,
        dtype=arguments.dtype,
        min_tail=arguments.min_tail,
        cuda_graphs=0,  # they would lengthen tails
        **_remote(arguments),
    )
    options = Options(
        max_length=sizing.max_length,
        query_tokens=arguments.query_tokens,
        limit=arguments.limit,
        num_fewshot=arguments.num_fewshot,
        gen_kwargs=gen_kwargs or None,
        apply_chat_template=arguments.apply_chat_template,
        enable_thinking=arguments.thinking,
        log_samples=arguments.log_samples,
    )
    return [evaluate(lm, method, tasks, options) for method in methods]
