"""Measures what a run's folder does not hold yet, with a bar for people who watch."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tailreplay.evals.plan import EvalPlan
    from tailreplay.evals.records import Record, RunFolder
    from tailreplay.evals.workers import Job, Measurer


def measure_into(folder: RunFolder, plan: EvalPlan, jobs: list[Job], workers: int, own: Measurer | None) -> None:
    """Measure documents and append each one's record to `folder` as soon as it is there.

    Parameters
    ----------
    workers : int
        Processes, if there is no `own`.
    own : Measurer, optional
        Runs everything in this process.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from tailreplay.evals.workers import measured

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        bar = progress.add_task("documents", total=len(jobs))
        for record in measured(plan, jobs, workers, own):
            folder.append(record)
            progress.update(bar, advance=1, description=f"{record['task']} {record['length']}")


def missing(plan: EvalPlan, records: Iterable[Record]) -> list[Job]:
    """Return what is left to measure: every cell's first document, then every cell's second, and so on.

    So a run that is stopped early has measured a share of each cell.
    """
    known = {(record["task"], record["length"], record["document"]) for record in records}
    cells = plan.cells()
    return [
        (task.info.name, length, index)
        for index in range(max(count for _, _, count in cells))
        for task, length, count in cells
        if index < count and (task.info.name, length, index) not in known
    ]
