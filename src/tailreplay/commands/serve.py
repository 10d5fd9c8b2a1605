"""`tailreplay serve`: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import sys
from typing import TYPE_CHECKING

from tailreplay.cache import PrefixCache
from tailreplay.commands.generate import replay_argument
from tailreplay.commands.storage_flags import add_flags, add_reuse_flags, approximate_policy, storage_settings
from tailreplay.errors import TailReplayError
from tailreplay.modes import Reuse, check_interval, parse_replay, parse_reuse
from tailreplay.sizes import format_bytes
from tailreplay.storage import parse_storage

if TYPE_CHECKING:
    from tailreplay.engines.transformers import HybridLM

_DTYPES = ("auto", "float32", "bfloat16", "float16")


def parser() -> argparse.ArgumentParser:
    """Return the command's argument parser."""
    out = argparse.ArgumentParser(
        prog="tailreplay serve",
        description="Serve a hybrid LLM over the OpenAI API, with a prefix cache that reuses every matched token.",
    )

    def add(flag: str, default: str | int | None, metavar: str, text: str) -> None:
        shown = "" if default is None else " (default: %(default)s)"
        out.add_argument(flag, default=default, type=type(default or ""), metavar=metavar, help=text + shown)

    out.add_argument("model", nargs="?", default="bundled", metavar="MODEL", help="folder, hub id or 'bundled'")
    out.add_argument(
        "--engine",
        default="transformers",
        choices=("transformers", "vllm", "auto"),
        help="'vllm' serves many requests at once; arguments after -- go to it; 'auto' takes it if it is installed",
    )
    add("--host", "127.0.0.1", "ADDRESS", "where to listen")
    add("--port", 8000, "PORT", "0 takes a free one")
    add("--host-bytes", "4GiB", "SIZE", "limit of the cache in host memory")
    add("--page-size", 64, "TOKENS", "tokens a page, a multiple of 16")
    add("--min-match", 32, "TOKENS", "a shorter match is a miss")
    add("--replay", "0.05", "MODE", "for requests that name no mode: a ratio in (0, 1], 'exact', 'zero' or 'off'")
    add("--device", None, "DEVICE", "like 'cuda:0' (default: CUDA if there is any, else CPU)")
    out.add_argument("--dtype", default="auto", choices=_DTYPES, help="'auto' is the checkpoint's own")
    add("--prefill-chunk", 2048, "TOKENS", "longest run of a prompt that is computed at once")
    add("--served-model-name", None, "NAME", "name in the API (default: MODEL)")
    add("--api-key", None, "KEY", "asked of every request but /health (default: $TAILREPLAY_API_KEY, or no key)")
    add("--max-queue", 64, "N", "requests that may wait for the one that runs; more get HTTP 429")
    add_reuse_flags(out)
    add_flags(out)
    return out


def run(args: argparse.Namespace) -> int:
    """Load the model and serve it until a signal comes."""
    if args.engine != "transformers":
        from tailreplay.commands import serve_vllm

        if args.engine == "vllm" or serve_vllm.is_installed():
            return serve_vllm.run(args, args.extra)
    if args.extra:
        raise TailReplayError("Arguments after -- go to vLLM: add --engine vllm.")
    from tailreplay.engines.transformers.resting import Rest
    from tailreplay.metrics import Metrics
    from tailreplay.server.app import create_app
    from tailreplay.server.serving import bind, serve, url_of
    from tailreplay.server.worker import Worker

    given = parse_reuse(start=args.start, reuse_approximate=approximate_policy(args.reuse_approximate))
    reuse = parse_replay(replay_argument(args.replay), default=given)
    check_interval(args.anchor_interval)
    for name, least in (("min_match", 1), ("prefill_chunk", 1), ("max_queue", 0)):
        if getattr(args, name) < least:
            raise TailReplayError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}.")
    if not 0 <= args.port < 1 << 16:
        raise TailReplayError(f"--port must be from 0 to 65535, got {args.port}.")
    # The address and the cache's sizes are checked before the model is loaded, which may take minutes.
    cache = PrefixCache(args.host_bytes, args.page_size, args.min_match, parse_storage(storage_settings(args)))
    with bind(args.host, args.port) as listener:
        lm = _load(args, cache, reuse)
        name = args.served_model_name or args.model
        key = args.api_key or os.environ.get("TAILREPLAY_API_KEY")
        metrics = Metrics()
        worker = Worker(metrics, args.max_queue, Rest(lm) if args.repair else None)
        app = create_app(lm, worker, metrics, name, key)
        url = url_of(listener)
        _show_requests()
        if not key and not _is_local(listener.getsockname()[0]):
            print("tailreplay: anybody who reaches this address may use the model: see --api-key.", file=sys.stderr)

        def ready() -> None:
            size = f"{format_bytes(cache.host_bytes)} for {cache.stats().tokens_limit:,} tokens{_below(args.tier)}"
            print(f"tailreplay: serving {name} at {url}/v1 ({_words(reuse)}, cache of {size}).", flush=True)

        serve(app, worker, listener, ready, cache.shutdown)
    return 0


def _load(args: argparse.Namespace, cache: PrefixCache, reuse: Reuse) -> HybridLM:
    from tailreplay.engines.transformers import HybridLM
    from tailreplay.engines.transformers.quiet import quiet_library

    quiet_library()
    return HybridLM.from_pretrained(
        args.model,
        cache=cache,
        replay=reuse,
        device=args.device,
        dtype=args.dtype,
        prefill_chunk=args.prefill_chunk,
        anchor_interval=args.anchor_interval,
    )


def _below(tiers: list[str]) -> str:
    return f", and {len(tiers)} tier{'s' if len(tiers) > 1 else ''} below" if tiers else ""


def _words(reuse: Reuse) -> str:
    return f"replay of {100 * reuse.ratio:g}%" if reuse.ratio is not None else f"mode {reuse.mode}"


def _is_local(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _show_requests() -> None:
    """Let the server's log of requests, one line each, go to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("tailreplay")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
