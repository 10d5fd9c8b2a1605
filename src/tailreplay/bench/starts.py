"""How a hit's tail should start: starts against each other at equal replayed tokens, by budget and anchor."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailreplay.errors import InvalidRequestError
from tailreplay.evals.start_rules import BLENDED, CARRIED, DECAYED, MEAN, MIXED, RECOMPUTE, WITHOUT_ANCHOR

if TYPE_CHECKING:
    from tailreplay.bench.starts_rows import StartRow
    from tailreplay.evals.plan import EvalPlan

TASKS = ("prose", "mid_question", "count")
LENGTHS = (1024, 2048, 4096)
RATIOS = (0.01, 0.02, 0.05, 0.1, 0.25)
ANCHORS = ("512", "25%", "50%", "75%", "90%")
STARTS = (MEAN, RECOMPUTE, CARRIED, MIXED, DECAYED)
EVERY_ANCHOR_AT = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    from tailreplay.bench.report_files import add_file_arguments

    parser.add_argument("model", nargs="?", default="bundled", help="hub id, folder, or 'bundled'")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=list(LENGTHS), help="tokens (default: 1024 2048 4096)"
    )
    parser.add_argument("--ratios", type=float, nargs="+", default=list(RATIOS), help="shares of the match replayed")
    parser.add_argument(
        "--anchors",
        nargs="+",
        default=list(ANCHORS),
        help="tokens between anchors, or where the last one lies: 512 50%% …",
    )
    parser.add_argument(
        "--starts",
        nargs="+",
        choices=(*STARTS, BLENDED),
        default=list(STARTS),
        help="beside zero states and exact replay (default: %(default)s)",
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="(default: all)")
    parser.add_argument("--samples", type=int, default=100, help="questions a cell, at least (default: %(default)s)")
    parser.add_argument("--hits", type=int, default=4, help="of a document, 0 for all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the documents (default: %(default)s)")
    parser.add_argument("--text", help="a text file with prose instead of Python's help topics")
    parser.add_argument(
        "--dtype", default="float32", help="(default: %(default)s: rounding would hide small differences)"
    )
    parser.add_argument("--device", help="cpu, cuda, …")
    parser.add_argument("--workers", type=int, help="processes (default: a core each for the bundled model, else 1)")
    parser.add_argument("--out", type=Path, help="folder of records (default: out/starts/MODEL); a run goes on there")
    parser.add_argument("--save", metavar="FILE", help="write the rows, a line of JSON each")
    add_file_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Measure what the folder does not hold yet, report all that it holds; returns the exit status."""
    from tailreplay.bench.report_files import check_files

    check_files(arguments, "save")
    if arguments.workers is not None and arguments.workers < 1:
        raise InvalidRequestError("--workers must be at least 1.")
    plan = plan_of(arguments)
    plan.check()
    settings, rows = _measured(plan, arguments)
    _report(arguments, settings, rows)
    return 0


def plan_of(arguments: argparse.Namespace) -> EvalPlan:
    """Return the evaluation that the options ask for, unchecked."""
    from tailreplay.evals.plan import EvalPlan

    return EvalPlan(
        model=arguments.model,
        tasks=tuple(arguments.tasks),
        methods=tuple(method_names(arguments.ratios, arguments.anchors, arguments.starts)),
        lengths=tuple(sorted(set(arguments.lengths))),
        samples=arguments.samples,
        hits=arguments.hits,
        seed=arguments.seed,
        dtype=arguments.dtype,
        device=arguments.device,
        text=arguments.text,
    )


def method_names(ratios: Sequence[float], anchors: Sequence[str], starts: Sequence[str] = STARTS) -> list[str]:
    """Return what is compared: the paper's start at every budget, the others at every budget from the first anchor.

    At one budget they start from every anchor; decayed ones, which are no better, at that alone.
    """
    names = [f"anchored/{anchor}" for anchor in dict.fromkeys((anchors[0], anchors[-1]))]
    for ratio in sorted(set(ratios)):
        some = anchors if ratio == EVERY_ANCHOR_AT else anchors[:1]
        names.append(f"replay@{ratio:g}")
        for start in starts:
            if start in WITHOUT_ANCHOR:
                names.append(f"{start}@{ratio:g}")
            elif start != DECAYED or ratio == EVERY_ANCHOR_AT:
                names += [f"{start}@{ratio:g}/{anchor}" for anchor in some]
    return names


def _measured(plan: EvalPlan, arguments: argparse.Namespace) -> tuple[dict[str, Any], list[StartRow]]:
    from tailreplay.bench.starts_rows import rows_of
    from tailreplay.evals.plan import default_workers
    from tailreplay.evals.progress import measure_into, missing
    from tailreplay.evals.records import RunFolder
    from tailreplay.evals.workers import Measurer

    measurer = Measurer(plan)
    costs = measurer.lm.backbone.costs
    settings = plan.settings(measurer.lm.fingerprint, str(measurer.lm.model.dtype).removeprefix("torch."))
    name = plan.model.rstrip("/").rsplit("/", 1)[-1].lstrip("-.") or "model"
    folder = RunFolder(arguments.out or Path("out/starts") / name, settings)
    jobs = missing(plan, folder.records())
    workers = min(arguments.workers or default_workers(plan.device, plan.model), len(jobs))
    own = measurer if workers <= 1 else None
    del measurer  # workers have models of their own
    measure_into(folder, plan, jobs, workers, own)
    return settings, rows_of(folder.records(), costs, plan.seed)


def _report(arguments: argparse.Namespace, settings: dict[str, Any], rows: list[StartRow]) -> None:
    from tailreplay.bench.files import writing
    from tailreplay.bench.report_files import write_files
    from tailreplay.bench.starts_picture import draw
    from tailreplay.bench.starts_table import grids_of, verdict_lines

    if arguments.save is not None:
        with writing(arguments.save):
            lines = [json.dumps({"model": settings["model"], **row.to_dict()}, allow_nan=False) for row in rows]
            Path(arguments.save).write_text("\n".join(lines) + "\n", encoding="utf-8")
    verdicts = verdict_lines(rows)
    write_files(
        arguments,
        "How a tail should start",
        grids_of(rows),
        lambda figure: draw(figure, rows),
        "Divergence and retention against operations",
    )
    if arguments.json:
        report = {"settings": settings, "rows": [row.to_dict() for row in rows], "verdicts": verdicts}
        print(json.dumps(report, allow_nan=False))
        return
    from tailreplay.commands.console import console
    from tailreplay.evals.report.table import table_of

    screen = console()
    for grid in grids_of(rows):
        screen.print(table_of(grid))
    print("\n".join(verdicts))
