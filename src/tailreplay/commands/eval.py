"""`tailreplay eval`: what share of quality a hit keeps, by method, task and length."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailreplay.evals.progress import measure_into, missing

if TYPE_CHECKING:
    from tailreplay.evals.plan import EvalPlan
    from tailreplay.evals.records import RunFolder

QUICK_METHODS = ["replay@0.05", "replay@0.25", "replay@1"]
LENGTHS = [1024, 2048, 4096, 8192]


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="tailreplay eval",
        description="Ask the same questions after a full prefill and after hits with each method, and compare the answers.",
    )
    parser.add_argument("model", nargs="?", default="bundled", help="hub id, folder, or 'bundled'")
    parser.add_argument("--tasks", nargs="+", help="some of the tasks (default: all; a wrong name lists them)")
    parser.add_argument(
        "--methods",
        nargs="+",
        help="replay@R …, exact, other starts (carried@R, decayed@R, mean@R, mixed@R, blended@R, recompute@R, anchored); "
        "full, zero and kv-wiped are always there (default: seven ratios)",
    )
    parser.add_argument(
        "--anchor-interval",
        type=int,
        default=512,
        help="tokens between the exact states that carried, decayed, mixed and anchored start from (default: %(default)s)",
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", help="tokens, question and answer included (default: 1024 2048 4096 8192)"
    )
    parser.add_argument("--samples", type=int, help="questions a cell, at least (default: 500)")
    parser.add_argument("--quick", action="store_true", help="a few samples of everything at 1,024 tokens")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--min-tail", type=int, default=0, help="shortest tail (the paper has none; servers take 64)")
    parser.add_argument("--text", help="a text file with prose instead of Python's help topics")
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16, float16 or float32")
    parser.add_argument("--device", help="cpu, cuda, …")
    parser.add_argument("--workers", type=int, help="processes (default: a core each for the bundled model, else 1)")
    parser.add_argument("--host-bytes", default="4GiB", help="room for one document's pages (default: %(default)s)")
    parser.add_argument(
        "--batch-bytes", default="512MiB", help="room for questions that run together (default: %(default)s)"
    )
    parser.add_argument("--codec", default="none", help="how the cache holds hiddens: none, int8 or fp8_e4m3")
    parser.add_argument(
        "--out",
        type=Path,
        help="folder of records and report (default: out/eval/MODEL); a run goes on where it stopped",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Measure what is not in the folder yet, report all that is; returns the exit status."""
    plan = make_plan(arguments)
    from tailreplay.errors import InvalidRequestError

    if arguments.workers is not None and arguments.workers < 1:
        raise InvalidRequestError("--workers must be at least 1.")
    plan.check()
    out = arguments.out or Path("out/eval") / (_name(plan.model) + ("-quick" if arguments.quick else ""))
    _make(out)
    from tailreplay.evals.plan import default_workers
    from tailreplay.evals.records import RunFolder
    from tailreplay.evals.workers import Measurer

    measurer = Measurer(plan)
    settings = plan.settings(measurer.lm.fingerprint, str(measurer.lm.model.dtype).removeprefix("torch."))
    folder = RunFolder(out, settings)
    jobs = missing(plan, folder.records())
    workers = min(arguments.workers or default_workers(plan.device, plan.model), len(jobs))
    own = measurer if workers <= 1 else None
    del measurer  # workers have models of their own: this one would only take memory
    measure_into(folder, plan, jobs, workers, own)
    try:
        _report(folder, settings, arguments)
    except OSError as error:
        raise InvalidRequestError(f"The report cannot be written to '{out}': {error}.") from error
    return 0


def make_plan(arguments: argparse.Namespace) -> EvalPlan:
    """Return the plan that the arguments ask for, unchecked."""
    from tailreplay.evals.methods import DEFAULT
    from tailreplay.evals.plan import EvalPlan
    from tailreplay.evals.tasks.registry import TASKS

    quick = arguments.quick
    return EvalPlan(
        model=arguments.model,
        tasks=tuple(arguments.tasks or TASKS),
        methods=tuple(arguments.methods or (QUICK_METHODS if quick else DEFAULT)),
        lengths=tuple(sorted(set(arguments.lengths or (LENGTHS[:1] if quick else LENGTHS)))),
        samples=(10 if quick else 500) if arguments.samples is None else arguments.samples,
        seed=arguments.seed,
        dtype=arguments.dtype,
        device=arguments.device,
        min_tail=arguments.min_tail,
        text=arguments.text,
        host_bytes=arguments.host_bytes,
        batch_bytes=arguments.batch_bytes,
        codec=arguments.codec,
        anchor_interval=arguments.anchor_interval,
    )


def _name(model: str) -> str:
    return model.rstrip("/").replace("/", "-").lstrip("-.") or "model"


def _make(out: Path) -> None:
    """Make the folder before the model is loaded, so that one that cannot be written is refused at once."""
    from tailreplay.errors import InvalidRequestError

    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "records.jsonl").touch()
    except OSError as error:
        raise InvalidRequestError(f"The folder '{out}' cannot be written: {error}.") from error


def _report(folder: RunFolder, settings: dict[str, Any], arguments: argparse.Namespace) -> None:
    from tailreplay.commands.console import console
    from tailreplay.evals.report import draw, print_tables, to_json, write_html
    from tailreplay.evals.summary import summarise
    from tailreplay.evals.tasks.registry import TASKS

    # All that the folder holds, also what an earlier call with other tasks or lengths measured.
    records = [record for record in folder.records() if record["task"] in TASKS]
    summary = summarise(records, {name: task.info for name, task in TASKS.items()})
    picture, page, data = (folder.path / name for name in ("retention.png", "report.html", "summary.json"))
    draw(summary, picture)
    write_html(summary, settings, picture.read_bytes(), page)
    report = to_json(summary, settings)
    data.write_text(json.dumps(report, allow_nan=False, indent=1) + "\n", encoding="utf-8")
    if arguments.json:
        print(json.dumps(report, allow_nan=False))
    else:
        print_tables(console(), summary, settings)
        print(f"report: {page}   picture: {picture}   data: {data}")
