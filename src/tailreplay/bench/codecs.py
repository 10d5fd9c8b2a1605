"""Codecs of page parts: bytes, speed on one core, error, and what that error does to replayed states."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from tailreplay.codecs import Codec

OUTLIERS, OUTLIER = (5, 70, 130, 200), 1000.0  # in two blocks, so that others are left


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--widths", type=int, nargs="+", default=[1024, 2560], help="channels of a token")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 4096], help="tokens coded in one call")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--model", default="bundled", help="replays states: a folder or hub id")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"], help="of the model")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the replayed prefix; 0: no replay")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.05, 1.0], help="shares of it to replay")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    import torch

    from tailreplay.codecs import CODECS, codec_of

    _check(arguments)
    codecs = [codec_of(name) for name in CODECS]
    with one_thread():
        speed = [
            row
            for width in arguments.widths
            for tokens in arguments.tokens
            for row in speed_rows(codecs, tokens, width, arguments.repeats)
        ]
    states = _states(arguments, codecs) if arguments.prompt else []
    report = {
        "dtype": "bfloat16",
        "threads": 1,
        "repeats": arguments.repeats,
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "speed": speed,
        "errors": [row for width in arguments.widths for row in error_rows(codecs, width)],
        "model": arguments.model,
        "model_dtype": arguments.dtype,
        "states": states,
    }
    if arguments.json:
        print(json.dumps(report))
    else:
        _print_tables(report)
    return 0


def speed_rows(codecs: Sequence[Codec], tokens: int, width: int, repeats: int) -> list[dict[str, Any]]:
    """Time coding of bfloat16 tokens ``(tokens, width)`` on this thread; returns a row for memcpy, then one a codec.

    Speeds are 10^9 bytes of bfloat16 a second, medians after a warm-up. What is coded again and again stays in the
    caches if it fits there, for memcpy as for the codecs.
    """
    import torch

    rows = torch.randn(tokens, width, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    copy = torch.empty_like(rows)
    calls: dict[tuple[str, str], Callable[[], object]] = {("memcpy", "encode"): lambda: copy.copy_(rows)}
    sizes = {"memcpy": width * rows.itemsize}
    for codec in codecs:
        sizes[codec.name] = codec.token_bytes((width,), rows.dtype)
        coded = torch.empty(tokens, sizes[codec.name], dtype=torch.uint8)
        calls[codec.name, "encode"] = lambda codec=codec, coded=coded: codec.encode(rows, coded)  # type: ignore[misc]
        calls[codec.name, "decode"] = lambda codec=codec, coded=coded: codec.decode(coded, copy)  # type: ignore[misc]
    seconds = _medians(calls, repeats)
    speed = {key: rows.nbytes / taken / 1e9 for key, taken in seconds.items()}
    return [
        {
            "codec": name,
            "width": width,
            "tokens": tokens,
            "token_bytes": size,
            "ratio": size / (width * rows.itemsize),
            "encode_gb_s": speed[name, "encode"],
            "decode_gb_s": speed.get((name, "decode"), speed[name, "encode"]),
        }
        for name, size in sizes.items()
    ]


def error_rows(codecs: Sequence[Codec], width: int, tokens: int = 1024) -> list[dict[str, Any]]:
    """Return the relative errors ``||x^ - x|| / ||x||`` of coded bfloat16 tokens, one row a codec.

    ``gaussian`` is of independent normal channels; ``outliers`` of the same with a few channels 1000 times as large;
    ``beside_outliers`` is the error of their blocks' other channels alone, and ``elsewhere`` of the other blocks. 0 where
    a token is too narrow to have such channels.
    """
    import torch

    from tailreplay.codec_room import BLOCK

    plain = torch.randn(tokens, width, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    channels = torch.tensor([channel for channel in OUTLIERS if channel < width], dtype=torch.long)
    rows = plain.clone()
    rows[:, channels] *= OUTLIER
    block = torch.arange(width) // BLOCK
    near = torch.isin(block, block[channels])
    beside = near.clone()
    beside[channels] = False
    found = []
    for codec in codecs:
        clean, dirty = _round_trip(codec, plain), _round_trip(codec, rows)
        row = {"codec": codec.name, "width": width, "gaussian": _relative(clean, plain)}
        row |= {"outliers": _relative(dirty, rows), "beside_outliers": _relative(dirty[:, beside], rows[:, beside])}
        found.append(row | {"elsewhere": _relative(dirty[:, ~near], rows[:, ~near])})
    return found


def _check(arguments: argparse.Namespace) -> None:
    from tailreplay.errors import InvalidRequestError

    if min(*arguments.widths, *arguments.tokens, arguments.repeats) < 1 or arguments.prompt < 0:
        raise InvalidRequestError("Widths, tokens and repeats must be at least 1, and the prompt at least 0.")
    if not all(0 < ratio <= 1 for ratio in arguments.ratios):
        raise InvalidRequestError("Ratios must lie in (0, 1].")


def _states(arguments: argparse.Namespace, codecs: Sequence[Codec]) -> list[dict[str, Any]]:
    from tailreplay.bench.codec_states import prose, state_rows
    from tailreplay.cache import PrefixCache
    from tailreplay.engines.transformers import HybridLM
    from tailreplay.engines.transformers.quiet import quiet_library

    quiet_library()
    print("replaying states …", file=sys.stderr, flush=True)
    lm = HybridLM.from_pretrained(arguments.model, cache=PrefixCache("16MiB"), dtype=arguments.dtype, cuda_graphs=0)
    return state_rows(lm, prose(lm, arguments.prompt), codecs, arguments.ratios)


def _medians(
    calls: dict[tuple[str, str], Callable[[], object]], repeats: int, warmup: int = 3
) -> dict[tuple[str, str], float]:
    """Return each call's median seconds."""
    taken: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for key, call in calls.items():
        for turn in range(warmup + repeats):
            begin = time.perf_counter()
            call()
            if turn >= warmup:
                taken[key].append(time.perf_counter() - begin)
    return {key: statistics.median(seconds) for key, seconds in taken.items()}


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread meanwhile."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _round_trip(codec: Codec, rows: torch.Tensor) -> torch.Tensor:
    import torch

    coded = torch.empty(rows.shape[0], codec.token_bytes(tuple(rows.shape[1:]), rows.dtype), dtype=torch.uint8)
    codec.encode(rows, coded)
    decoded = torch.empty_like(rows)
    codec.decode(coded, decoded)
    return decoded


def _relative(got: torch.Tensor, true: torch.Tensor) -> float:
    """0 where there is nothing to compare."""
    norm = float(true.double().norm())
    return float((got.double() - true.double()).norm()) / norm if norm else 0.0


def _print_tables(report: dict[str, Any]) -> None:
    from rich.table import Table

    from tailreplay.commands.console import console

    columns: dict[str, dict[str, tuple[str, str]]] = {
        "speed": {
            "codec": ("codec", ""),
            "width": ("channels", "d"),
            "tokens": ("tokens", "d"),
            "token_bytes": ("bytes a token", "d"),
            "ratio": ("of bf16", ".3f"),
            "encode_gb_s": ("encode GB/s", ".2f"),
            "decode_gb_s": ("decode GB/s", ".2f"),
        },
        "errors": {
            "codec": ("codec", ""),
            "width": ("channels", "d"),
            "gaussian": ("gaussian", ".2e"),
            "outliers": ("with outliers", ".2e"),
            "beside_outliers": ("beside them", ".2e"),
            "elsewhere": ("other blocks", ".2e"),
        },
        "states": {
            "codec": ("codec", ""),
            "ratio": ("r", ".0%"),
            "replayed": ("replayed", "d"),
            "worst": ("worst layer", ".2e"),
            "median": ("median layer", ".2e"),
            "to_prefill": ("to prefill", ".2e"),
            "to_prefill_lossless": ("to prefill, lossless", ".2e"),
        },
    }
    titles = {
        "speed": f"bfloat16, one thread, medians of {report['repeats']}",
        "errors": f"relative error; outliers: {len(OUTLIERS)} channels {OUTLIER:g} times as large",
        "states": f"relative error of replayed states, beside lossless hiddens: {report['model']}",
    }
    for name, shown in columns.items():
        if not report[name]:
            continue
        table = Table(title=titles[name])
        for heading, _ in shown.values():
            table.add_column(heading, justify="right")
        for row in report[name]:
            table.add_row(*(format(row[key], style) for key, (_, style) in shown.items()))
        console().print(table)
