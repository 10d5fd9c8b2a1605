"""The bundled model in float32, and records of each task's first document."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tailreplay.evals.document import Document
from tailreplay.evals.methods import DEFAULT
from tailreplay.evals.plan import EvalPlan
from tailreplay.evals.tasks.registry import TASKS
from tailreplay.evals.workers import Measurer

LENGTH = 1024


class Bench:
    """A measurer with what it found, each task's first document measured once."""

    def __init__(self) -> None:
        plan = EvalPlan("bundled", tuple(TASKS), tuple(DEFAULT), (LENGTH,), dtype="float32", host_bytes="256MiB")
        self.measurer = Measurer(plan)
        self.lm = self.measurer.lm
        self.record = cache(self._record)

    def document(self, task: str) -> Document:
        return self.measurer.document((task, LENGTH, 0))

    def _record(self, task: str) -> dict[str, Any]:
        return self.measurer.measure((task, LENGTH, 0))


@pytest.fixture(scope="session")
def bench() -> Bench:
    return Bench()
