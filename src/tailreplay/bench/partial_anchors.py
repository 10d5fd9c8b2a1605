"""Anchors that keep only heads that hardly forget: bytes, state error and NLL, against whole anchors and zero states."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from tailreplay.errors import InvalidRequestError

if TYPE_CHECKING:
    import torch

    from tailreplay.engines.transformers import HybridLM
    from tailreplay.forgetting import Floats

_CONTINUATION = 128
_SHORTEST = 512
"""Room for the continuation, and for the shortest tail before every hit."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--model", default="bundled", help="a folder or hub id")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a text")
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--hits", type=int, default=8, help="hits in the last half of each text")
    parser.add_argument("--every", type=int, default=512, help="tokens from anchor to anchor")
    parser.add_argument(
        "--left", type=float, nargs="+", default=[0.37, 0.1, 0.05, 0.01],
        help="keep heads that keep more than this share of their state from anchor to anchor, on average half as far",
    )  # fmt: skip
    parser.add_argument("--ratio", type=float, default=0.05, help="of the replay from zero states beside them")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    from tailreplay.bench.lengths import check_fits
    from tailreplay.budget import Ratio
    from tailreplay.cache import PrefixCache
    from tailreplay.engines.transformers import HybridLM
    from tailreplay.engines.transformers.quiet import quiet_library

    least = max(_SHORTEST, 4 * arguments.every)
    if min(arguments.texts, arguments.hits, arguments.every) < 1 or arguments.length < least:
        raise InvalidRequestError(
            f"Texts, hits and --every must be at least 1, and a length four times --every and {_SHORTEST} or more."
        )
    Ratio(arguments.ratio)  # its check is ours
    if not all(0 < left < 1 for left in arguments.left):
        raise InvalidRequestError("Shares that are left must lie in (0, 1).")
    quiet_library()
    lm = HybridLM.from_pretrained(arguments.model, cache=PrefixCache("64MiB"), cuda_graphs=0)
    check_fits(lm, arguments.length)
    report = {"model": arguments.model, "length": arguments.length, "every": arguments.every}
    report["rows"] = _rows(lm, arguments)
    if arguments.json:
        print(json.dumps(report))
    else:
        _print_table(report)
    return 0


def _rows(lm: HybridLM, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    import numpy as np

    from tailreplay.engines.transformers.horizons import measure_horizons
    from tailreplay.forgetting import slow_heads

    horizons = measure_horizons(lm.backbone, _text(lm, arguments.length, "horizons"))
    whole = np.ones(horizons.tokens.shape, dtype=np.bool_)
    kept: dict[str, Any] = {"whole anchor": whole}
    for left in arguments.left:
        kept[f"heads left with {left:g}"] = slow_heads(horizons.tokens, arguments.every // 2, left)
    kept["zero, same tail"] = ~whole
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for index in range(arguments.texts):
        print(f"text {index + 1} of {arguments.texts} …", file=sys.stderr, flush=True)
        _measure(lm, _text(lm, arguments.length, index), arguments, kept, found)
    full = statistics.mean(found["full prefill"]["nll"])
    rows = []
    for name, values in found.items():
        row: dict[str, Any] = {key: statistics.mean(value) for key, value in values.items()}
        mask = kept.get(name)
        row |= {"heads": None if mask is None else float(mask.mean()), "nll_over_full": row.pop("nll") - full}
        rows.append({"start": name, **row})
    return rows


def _measure(
    lm: HybridLM, ids: list[int], arguments: argparse.Namespace, kept: dict[str, Any], found: dict[str, Any]
) -> None:
    """Hit a text at tokens spread over its last half, and note errors and NLL by start. Mutates `found`."""
    import math

    import torch

    from tailreplay.engines.transformers.replay import replay

    backbone, every = lm.backbone, arguments.every
    last = len(ids) - _CONTINUATION - 1
    # At odd distances after the anchors, so that every distance is as likely.
    ends = [last - round(i * last / 2 / arguments.hits) for i in range(arguments.hits)]
    states, hiddens, kv = _prefill(lm, ids, sorted({*ends, *(end // every * every for end in ends)}))
    for end in ends:
        anchor = end // every * every
        starts = [(name, anchor, mask) for name, mask in kept.items()]
        tail = max(64, math.ceil(arguments.ratio * end))
        starts.append((f"zero, r = {arguments.ratio:g}", end - tail, None))
        for name, begin, mask in starts:
            cache = _started(lm, states[anchor], mask)
            with torch.inference_mode():
                tails = [end - begin] * len(backbone.topology.groups)
                replay(backbone, cache, ids[:end], tails, lambda g, a, b: hiddens[g][:, a:b])
            _note(lm, found[name], ids, end, cache, states[end], kv)
            found[name]["replayed"].append(end - begin)
        _note(lm, found["full prefill"], ids, end, states[end], states[end], kv)
        _note(lm, found["zero, no tail"], ids, end, _started(lm, states[anchor], None), states[end], kv)


def _prefill(lm: HybridLM, ids: list[int], stops: list[int]) -> tuple[dict[int, Any], list[torch.Tensor], Any]:
    """Return the states at `stops`, the hiddens by stored group, and keys and values."""
    import torch

    from tailreplay.engines.transformers import compat

    backbone, states, start = lm.backbone, {}, 0
    sink: list[list[torch.Tensor]] = [[] for _ in backbone.topology.stored_groups]
    with torch.inference_mode():
        running = backbone.new_cache(len(ids))
        for stop in stops:
            if stop > start:
                backbone.forward(ids[start:stop], start, running, sink)
            states[stop] = compat.new_cache(backbone.config)
            compat.copy_states(running, states[stop])
            start = stop
        return (
            states,
            [torch.cat(parts)[None] for parts in sink],
            [entry.rows(0, start) for entry in backbone.kv(running)],
        )


def _started(lm: HybridLM, anchor: Any, mask: Floats | None) -> Any:
    """Return an anchor's states with only the heads of `mask`; empty ones without one, or if it keeps none."""
    import torch

    from tailreplay.engines.transformers import compat
    from tailreplay.engines.transformers.gates import gated_layers

    cache = lm.backbone.new_cache(1)
    if mask is None or not mask.any():
        return cache
    with torch.inference_mode():
        compat.copy_states(anchor, cache)
        for row, layer in enumerate(gated_layers(lm.backbone.topology)):
            state = compat.states(cache, layer)[1]
            assert state is not None
            state[:, torch.as_tensor(~mask[row], device=state.device)] = 0
    return cache


def _note(lm: HybridLM, found: Any, ids: list[int], end: int, states: Any, true: Any, kv: Any) -> None:
    import torch
    from torch.nn import functional

    from tailreplay.evals.branches import Branches
    from tailreplay.evals.prefix import state_errors

    errors = [error for error in state_errors(lm, states, true) if error is not None]
    found["worst_layer"].append(max(errors))
    found["mean_layer"].append(statistics.mean(errors))
    query = torch.tensor([ids[end : end + _CONTINUATION + 1]])
    held = [(keys[:end], values[:end]) for keys, values in kv]
    logits = Branches(lm.backbone, held, [states], end, query.shape[1]).run(query, query.shape[1])
    loss = functional.cross_entropy(logits[0, :-1], query[0, 1:].to(logits.device))
    found["nll"].append(float(loss))


def _text(lm: HybridLM, tokens: int, seed: object) -> list[int]:
    import random

    from tailreplay.evals.material import python_topics

    ids: list[int] = []
    for paragraph in python_topics().passage(random.Random(f"anchors/{seed}")):
        ids += lm.encode(paragraph + "\n", add_special_tokens=not ids)
        if len(ids) >= tokens:
            break
    return ids[:tokens]


def _print_table(report: dict[str, Any]) -> None:
    from rich.table import Table

    from tailreplay.commands.console import console

    title = f"{report['model']}: anchors every {report['every']} of {report['length']:,} tokens"
    table = Table(title=title)
    for column in ("start", "state kept", "replayed", "worst layer", "mean layer", "NLL over full"):
        table.add_column(column, justify="right")
    for row in report["rows"]:
        heads, replayed = row["heads"], row.get("replayed")
        table.add_row(
            row["start"],
            "" if heads is None else f"{heads:.0%}",
            "" if replayed is None else f"{replayed:.0f}",
            f"{row['worst_layer']:.4f}",
            f"{row['mean_layer']:.4f}",
            f"{row['nll_over_full']:.4f}",
        )
    console().print(table)
