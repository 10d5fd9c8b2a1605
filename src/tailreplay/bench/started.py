"""Servers that a benchmark starts on vLLM to compare: without a prefix cache, with vLLM's own, with tailreplay."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tailreplay.bench.endpoint import Endpoint
from tailreplay.bench.vllm_client import NAME


@contextmanager
def started(
    arguments: argparse.Namespace, kind: str, model: str, longest: int, settings: dict[str, Any] | None = None
) -> Iterator[Endpoint]:
    """Start vLLM, wait for it, and end it with the ``with`` block.

    Parameters
    ----------
    arguments : argparse.Namespace
        With ``host_bytes``, ``server_arg`` and ``timeout``.
    kind : str
        "none", "own" (vLLM's), or another word for tailreplay.
    model : str
        Folder or hub id.
    longest : int
        Tokens that the longest request needs.
    settings : dict or None
        More of the connector's (see `engines.vllm.settings.Settings`).

    Raises
    ------
    TailReplayError
        If it does not start; the end of its log goes to stderr.
    """
    import torch

    from tailreplay.bench.vllm_server import VllmServer

    extra = ["--max-num-batched-tokens", "2048", "--max-model-len", str(longest)]
    if not torch.cuda.is_available():
        extra = ["--enforce-eager", *extra]
    if kind == "own":
        extra.append("--enable-prefix-caching")
    ours = None if kind in ("none", "own") else {"host_bytes": arguments.host_bytes, **(settings or {})}
    with VllmServer(model, ours, [*extra, *arguments.server_arg]) as server:
        server.wait()
        yield Endpoint(kind, f"http://127.0.0.1:{server.port}", NAME, arguments.timeout, tells=True)
