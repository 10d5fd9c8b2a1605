"""`tailreplay inspect --horizons`: how long each head of a model remembers. Reads the weights."""

from __future__ import annotations

import argparse
import math
import random
from typing import TYPE_CHECKING, Any

from tailreplay.errors import InvalidRequestError

if TYPE_CHECKING:
    from tailreplay.engines.transformers.backbone import Backbone

_NAMED = 8
"""Heads of a layer that are shown each on its own; of more, the quartiles are."""


def horizons_report(arguments: argparse.Namespace, dtype: Any) -> dict[str, Any]:
    """Load a model, run Python's help topics through it, and return the horizons of its heads.

    Parameters
    ----------
    arguments : Namespace
        Of `tailreplay inspect`: model, tokens (the text's length), tail (heads that remember longer are named) and ratio.
    dtype : torch.dtype or None
        The checkpoint's own if None.

    Raises
    ------
    InvalidRequestError
        If a number is out of range, or the model has no gates.
    """
    from tailreplay.engines.transformers.horizons import measure_horizons, rounded
    from tailreplay.forgetting import slow_heads

    if arguments.tokens < 2 or (arguments.tail is not None and arguments.tail < 1):
        raise InvalidRequestError("--tokens must be at least 2, and --tail at least 1.")
    backbone, ids = _loaded(str(arguments.model), arguments.tokens, dtype)
    found = measure_horizons(backbone, ids)
    tail = arguments.tail or math.ceil(arguments.ratio * found.text_tokens)
    slow = slow_heads(found.tokens, tail)
    layers = [
        {
            "layer": layer,
            "horizons": [rounded(value) for value in found.tokens[row]],
            "shares": [round(float(value), 4) for value in found.shares[row]],
            "slow": [int(head) for head in slow[row].nonzero()[0]],
        }
        for row, layer in enumerate(found.layers)
    ]
    return {"text_tokens": found.text_tokens, "tail": tail, "layers": layers}


def print_horizons(report: dict[str, Any]) -> None:
    """Print the report as a table and a list of the heads that hardly forget."""
    from rich.table import Table

    from tailreplay.commands.console import console

    out = console()
    few = len(report["layers"][0]["horizons"]) <= _NAMED
    heads = "by head: horizon (share of the state)" if few else "shortest, quartiles, longest"
    table = Table(title=f"Tokens until a head keeps 1/e, over {report['text_tokens']:,} tokens of text")
    for column in ("layer", heads, f"beyond {report['tail']:,}", "their share of the state"):
        table.add_column(column, justify="right")
    for row in report["layers"]:
        pairs = list(zip(row["horizons"], row["shares"], strict=True))
        ordered = sorted(row["horizons"])
        points = [ordered[round(part * (len(ordered) - 1) / 4)] for part in range(5)]
        shown = (
            [f"{horizon:,g} ({100 * share:.0f}%)" for horizon, share in pairs] if few else [f"{p:,g}" for p in points]
        )
        share = sum(row["shares"][head] for head in row["slow"])
        table.add_row(str(row["layer"]), "  ".join(shown), str(len(row["slow"])), f"{100 * share:.0f}%")
    out.print(table)
    named = [f"layer {row['layer']} head {head}" for row in report["layers"] for head in row["slow"]]
    if named:
        out.print(f"Heads that hardly forget within {report['tail']:,} tokens: {', '.join(named)}.")
    else:
        out.print(f"Every head forgets within {report['tail']:,} tokens.")
    out.print("By the gates alone: the delta rule also writes over what is there, so states may go sooner.")


def _loaded(model: str, tokens: int, dtype: Any) -> tuple[Backbone, list[int]]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from tailreplay.engines.transformers.backbone import Backbone
    from tailreplay.engines.transformers.devices import usable_device
    from tailreplay.engines.transformers.families.registry import family_of
    from tailreplay.evals.material import python_topics
    from tailreplay.loading import load_errors, model_path

    path = model_path(model)
    with load_errors(model):
        # The config first: a model that cannot be replayed is refused before its weights are read.
        family_of(AutoConfig.from_pretrained(path).get_text_config(decoder=True))
        tokenizer = AutoTokenizer.from_pretrained(path)
        loaded = AutoModelForCausalLM.from_pretrained(path, dtype=dtype or "auto").to(usable_device(None))
    backbone = Backbone(loaded.eval())
    room = min(tokens, backbone.max_tokens or tokens)
    ids: list[int] = []
    for paragraph in python_topics().passage(random.Random(0)):
        ids += tokenizer.encode(paragraph + "\n", add_special_tokens=not ids)
        if len(ids) >= room:
            break
    return backbone, ids[:room]
