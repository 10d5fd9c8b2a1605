"""CPU kernels of the gated delta rule against the library's own functions, in turn."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from tailreplay.errors import InvalidRequestError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 103, 410, 2048], help="tokens")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--width", type=int, default=128, help="key and value width of a head")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="print one JSON list instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    import torch

    _check(arguments)
    before = torch.get_num_threads()
    try:
        with torch.inference_mode():
            rows = [row for threads in arguments.threads for row in _rows(arguments, threads)]
    finally:
        torch.set_num_threads(before)
    if arguments.json:
        print(json.dumps(rows))
        return 0
    print(f"{'':<12} {'threads':>7} {'dtype':>9} {'tokens':>7} {'library':>11} {'kernel':>11} {'ratio':>7}")
    for row in rows:
        print(
            f"{row['what']:<12} {row['threads']:7} {row['dtype']:>9} {row['tokens']:7} {row['library_ms']:8.2f} ms "
            f"{row['kernel_ms']:8.2f} ms {row['ratio']:6.1f}x"
        )
    return 0


def _check(arguments: argparse.Namespace) -> None:
    for name in ("lengths", "heads", "width", "threads", "repeats"):
        given = getattr(arguments, name)
        if min(given if isinstance(given, list) else [given]) < 1:
            raise InvalidRequestError(f"--{name} must be at least 1, got {given}.")


def _rows(arguments: argparse.Namespace, threads: int) -> Iterator[dict[str, Any]]:
    import torch

    torch.set_num_threads(threads)
    for dtype in arguments.dtypes:
        for tokens in arguments.lengths:
            for what, pair in _functions(arguments, tokens, getattr(torch, dtype)).items():
                library, kernel = _medians(pair, arguments.repeats)
                yield _row(what, threads, dtype, tokens, library, kernel)


def _row(what: str, threads: int, dtype: str, tokens: int, before: float, after: float) -> dict[str, Any]:
    return {
        "what": what,
        "threads": threads,
        "dtype": dtype,
        "tokens": tokens,
        "library_ms": before,
        "kernel_ms": after,
        "ratio": before / after,
    }


def _functions(
    arguments: argparse.Namespace, tokens: int, dtype: Any
) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Return the library's function and ours, by what they do."""
    import torch
    from transformers.models.qwen3_5 import modeling_qwen3_5 as library

    from tailreplay.engines.transformers.kernels.library import chunk_rule, convolution, step_rule

    torch.manual_seed(tokens)
    heads, width = arguments.heads, arguments.width
    mixed, weight = torch.randn(1, tokens, 3 * heads * width).to(dtype), torch.randn(3 * heads * width, 4).to(dtype)
    # As in a mixer: views of one token-major tensor.
    query, key, value = (part.unflatten(-1, (heads, width)) for part in mixed.split(heads * width, -1))
    given = {
        "g": -0.05 * torch.rand(1, tokens, heads),
        "beta": torch.rand(1, tokens, heads).to(dtype),
        "initial_state": torch.randn(1, heads, width, width),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }
    step = {name: x[:, :1] if name in ("g", "beta") else x for name, x in given.items()}  # type: ignore[index]

    def rule(function: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: function(query, key, value, **given)

    def one(function: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: function(query[:, :1], key[:, :1], value[:, :1], **step)

    def conv(function: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: function(mixed.transpose(1, 2), weight, None, activation="silu")

    chunked, single, convolve = (
        library.torch_chunk_gated_delta_rule,
        library.torch_recurrent_gated_delta_rule,
        library.causal_conv1d_fn,
    )
    found = {
        "delta rule": (rule(chunked), rule(chunk_rule(chunked))),
        "convolution": (conv(convolve), conv(convolution(convolve))),
    }
    if tokens == min(arguments.lengths):
        found["one token"] = (one(single), one(step_rule(single)))
    return found


def _medians(functions: tuple[Callable[[], Any], ...], repeats: int) -> list[float]:
    """Milliseconds of each, called in turn, so that drift of the machine meets all; the first round is not counted."""
    times: list[list[float]] = [[] for _ in functions]
    for turn in range(repeats + 1):
        for function, taken in zip(functions, times, strict=True):
            begin = time.perf_counter()
            function()
            if turn:
                taken.append(1000 * (time.perf_counter() - begin))
    return [median(taken) for taken in times]
