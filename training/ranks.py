"""The processes of a run: one thread each, which sum their gradients. Faster here than one process with threads."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

_RANK, _RANKS, _MEETING = "TAILREPLAY_TRAIN_RANK", "TAILREPLAY_TRAIN_RANKS", "TAILREPLAY_TRAIN_MEETING"


def launch(arguments: list[str], ranks: int) -> int:
    """Run ``python -m training rank …`` once a rank, and wait; returns the first status that is not 0.

    If one ends badly, the others are ended too.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            environment = {
                **os.environ,
                _RANK: str(rank),
                _RANKS: str(ranks),
                _MEETING: str(Path(folder) / "meeting"),
                "OMP_NUM_THREADS": "1",
                # Freed memory is kept: giving megabytes back and asking again costs more than the arithmetic.
                "MALLOC_MMAP_MAX_": "0",
                "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
            }
            command = [sys.executable, "-m", "training", "rank", *arguments]
            processes.append(subprocess.Popen(command, env=environment))
        try:
            return _wait(processes)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.terminate()
            for process in processes:
                process.wait()


def _wait(processes: list[subprocess.Popen[bytes]]) -> int:
    while True:
        for process in processes:
            try:
                status = process.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                continue
            if status:
                return status
        if all(process.poll() == 0 for process in processes):
            return 0


class Ranks:
    """This process among the others. With one rank nothing is sent."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get(_RANK, "0"))
        self.count = int(os.environ.get(_RANKS, "1"))
        if self.count > 1:
            meeting = f"file://{os.environ[_MEETING]}"
            dist.init_process_group("gloo", init_method=meeting, rank=self.rank, world_size=self.count)

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes."""
        return self.rank == 0

    def mean(self, values: Tensor) -> None:
        """Replace `values` by their mean over ranks, in place."""
        if self.count > 1:
            dist.all_reduce(values)
            values /= self.count

    def sum(self, values: Tensor) -> None:
        """Replace `values` by their sum over ranks, in place."""
        if self.count > 1:
            dist.all_reduce(values)

    def agreed(self, value: float) -> float:
        """Return the first rank's `value` on all ranks: what a clock says must not differ."""
        if self.count == 1:
            return value
        box = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(box, 0)
        return float(box)

    def close(self) -> None:
        """Leave the group."""
        if self.count > 1:
            dist.destroy_process_group()
