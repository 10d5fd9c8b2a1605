"""Adaptive budgets against ratios that replay as many tokens: state errors, and the NLL of what follows."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tailreplay.errors import InvalidRequestError

if TYPE_CHECKING:
    from tailreplay.engines.transformers import HybridLM
    from tailreplay.evals.document import Document
    from tailreplay.evals.methods import Method

_CALIBRATION_TEXTS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--model", default="bundled", help="a folder or hub id")
    parser.add_argument("--task", default="prose", help="what is asked after hits (see `tailreplay eval --list`)")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a document")
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--errors", type=float, nargs="+", default=[0.6, 0.4, 0.2, 0.1, 0.05])
    parser.add_argument(
        "--most", type=float, default=1.0, help="greatest share of the prefix that an adaptive tail takes"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    from dataclasses import asdict

    from tailreplay.bench.lengths import check_fits
    from tailreplay.cache import PrefixCache
    from tailreplay.engines.transformers import HybridLM
    from tailreplay.engines.transformers.quiet import quiet_library
    from tailreplay.evals.plan import SHORTEST
    from tailreplay.storage import Storage

    if arguments.length < SHORTEST or arguments.documents < 1 or not all(0 < error <= 1 for error in arguments.errors):
        raise InvalidRequestError(
            f"The length must be at least {SHORTEST}, documents at least 1, and errors in (0, 1]."
        )
    quiet_library()
    # What is compared are tails from zero states.
    cache = PrefixCache("1GiB", storage=Storage(anchor_bytes=0))
    lm = HybridLM.from_pretrained(arguments.model, cache=cache, cuda_graphs=0)
    check_fits(lm, arguments.length)
    documents = _documents(lm, arguments)
    calibration = calibrated(lm, arguments.length, arguments.seed)
    adaptive = adaptive_methods(arguments.errors, arguments.most, calibration)
    print(f"calibrated: {calibration}", file=sys.stderr, flush=True)
    chosen = choices(lm, documents, adaptive)
    methods = [method for pair in zip(adaptive, ratio_methods(adaptive, chosen), strict=True) for method in pair]
    rows = measured(lm, documents, methods)
    for row in rows:
        found = chosen.get(row["method"])
        if found is not None:
            row |= {"predicted": statistics.mean(found.predicted), "cut": found.cut / len(found.predicted)}
            row["tokens"] = statistics.mean(found.tokens)
    report = {"model": arguments.model, "task": arguments.task, "length": arguments.length, "rows": rows}
    report |= {"documents": arguments.documents, "calibration": asdict(calibration)}
    if arguments.json:
        print(json.dumps(report))
    else:
        _print_table(report)
    return 0


@dataclass
class Choices:
    """What a budget chose at each hit: tokens replayed (mean over groups), of how many, and the predicted error."""

    tokens: list[float] = field(default_factory=list)
    matched: list[int] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)
    cut: int = 0


def calibrated(lm: HybridLM, length: int, seed: int) -> Any:
    """Return the model's calibration on passages of Python's help topics that begin elsewhere than the documents."""
    import random

    from tailreplay.engines.transformers.calibration import calibrate
    from tailreplay.evals.material import python_topics

    texts = []
    for index in range(_CALIBRATION_TEXTS):
        ids: list[int] = []
        for paragraph in python_topics().passage(random.Random(f"calibration/{seed}/{index}")):
            ids += lm.encode(paragraph + "\n", add_special_tokens=not ids)
            if len(ids) >= length // 2:
                break
        texts.append(ids[: length // 2])
    return calibrate(lm.backbone, texts)


def adaptive_methods(errors: list[float], most: float, calibration: Any) -> list[Method]:
    """Return a method for each error."""
    from tailreplay.budget import Adaptive
    from tailreplay.evals.methods import Method
    from tailreplay.modes import Reuse

    return [
        Method(f"adaptive@{error:g}", Reuse("replay", Adaptive(error, 0, most, calibration=calibration)))
        for error in errors
    ]


def ratio_methods(adaptive: list[Method], chosen: dict[str, Choices]) -> list[Method]:
    """Return for each adaptive method the ratio that replays as many tokens in all."""
    from tailreplay.evals.methods import parse_method

    shares = [sum(chosen[method.name].tokens) / sum(chosen[method.name].matched) for method in adaptive]
    return [parse_method(f"replay@{min(share, 1.0):.5f}") for share in shares]


def choices(lm: HybridLM, documents: list[Document], methods: list[Method]) -> dict[str, Choices]:
    """Return by method what its budget chooses at the documents' hits."""
    from tailreplay.evals.prefix import Prefix

    found: dict[str, Choices] = defaultdict(Choices)
    for document in documents:
        for boundary in Prefix(lm, document).boundaries():
            for method in methods:
                assert method.reuse is not None
                ids = [*boundary.ids, boundary.hit.probes[0].query[0]]
                plan = lm.cache.lookup(ids, lm.namespace(), method.reuse, lm.backbone.topology)
                lm.cache.release(plan)
                one = found[method.name]
                one.tokens.append(statistics.mean(plan.tails))
                one.matched.append(plan.matched)
                one.predicted.append(plan.predicted_error if plan.predicted_error is not None else 1.0)
                one.cut += plan.budget_note == "cut"
    return found


def measured(lm: HybridLM, documents: list[Document], methods: list[Method]) -> list[dict[str, Any]]:
    """Ask every question under every method, a full prefill and zero states; returns one row a method."""
    from tailreplay.evals.measure import Asker
    from tailreplay.evals.methods import FULL, ZERO, parse_method

    everyone = [parse_method(FULL), *methods, parse_method(ZERO)]
    asker = Asker(lm, everyone)
    losses: dict[str, list[float]] = defaultdict(list)
    scores: dict[str, list[float]] = defaultdict(list)
    errors: dict[str, list[list[float]]] = defaultdict(list)
    for index, document in enumerate(documents):
        print(f"document {index + 1} of {len(documents)} …", file=sys.stderr, flush=True)
        for record in asker.measure(document):
            for name, found in record["state_error"].items():
                errors[name].append([error for error in found if error is not None])
            for probe in record["probes"]:
                for name, result in probe["results"].items():
                    losses[name].append(result["nll"])
                    if result["score"] is not None:
                        scores[name].append(result["score"])
    return [_row(method.name, losses, scores, errors) for method in everyone]


def _row(
    name: str, losses: dict[str, list[float]], scores: dict[str, list[float]], errors: dict[str, list[list[float]]]
) -> dict[str, Any]:
    from tailreplay.evals.methods import FULL, ZERO

    full, zero, mine = (statistics.mean(losses[method]) for method in (FULL, ZERO, name))
    hits = errors.get(name)
    return {
        "method": name,
        "nll_over_full": mine - full,
        "gap_closed": 1 - (mine - full) / (zero - full) if zero != full else None,
        "score": statistics.mean(scores[name]) if scores.get(name) else None,
        "worst_layer": statistics.mean(max(hit) for hit in hits) if hits else None,
        "mean_layer": statistics.mean(statistics.mean(hit) for hit in hits) if hits else None,
    }


def _documents(lm: HybridLM, arguments: argparse.Namespace) -> list[Document]:
    from tailreplay.evals.material import python_topics
    from tailreplay.evals.tasks.registry import tasks_named

    (task,), material = tasks_named([arguments.task]), python_topics()

    def encode(text: str) -> list[int]:
        return lm.encode(text, add_special_tokens=False)

    return [
        task.document(arguments.length, index, arguments.seed, material, encode) for index in range(arguments.documents)
    ]


def _print_table(report: dict[str, Any]) -> None:
    from rich.table import Table

    from tailreplay.commands.console import console

    table = Table(
        title=f"{report['model']}, {report['task']}, {report['documents']} documents of {report['length']:,} tokens"
    )
    for column in (
        "method",
        "replayed",
        "predicted",
        "cut",
        "worst layer",
        "mean layer",
        "NLL over full",
        "gap closed",
        "score",
    ):
        table.add_column(column, justify="right")
    for row in report["rows"]:
        cells = [row["method"]]
        for name, form in (
            ("tokens", ".0f"), ("predicted", ".3f"), ("cut", ".0%"), ("worst_layer", ".4f"), ("mean_layer", ".4f"),
            ("nll_over_full", ".4f"), ("gap_closed", ".1%"), ("score", ".1%"),
        ):  # fmt: skip
            value = row.get(name)
            cells.append("" if value is None else format(value, form))
        table.add_row(*cells)
    console().print(table)
