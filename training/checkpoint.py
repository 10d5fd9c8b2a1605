"""Checkpoints: written under another name and then renamed, so that there is always a whole one."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from training.model import Hybrid
from training.optimiser import Optimiser

FILE = "checkpoint.pt"


@dataclass
class Position:
    """How far a run is. Batches depend on `step` alone, so this is the data stream's position too."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    total: int = 0


def save(folder: Path, model: Hybrid, optimiser: Optimiser, position: Position, digest: str) -> None:
    """Write the run's whole state, atomically.

    The random numbers of a run are functions of its seed and step; torch's generator is kept for good measure.
    """
    state = {
        "digest": digest,
        "position": asdict(position),
        "model": {name: p.detach() for name, p in model.parameters.items()},
        "optimiser": optimiser.state(),
        "generator": torch.get_rng_state(),
    }
    partial = folder / f"{FILE}.partial"
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / FILE)


def load(folder: Path, model: Hybrid, optimiser: Optimiser, digest: str) -> Position | None:
    """Restore the run's state in place; None if there is none.

    Raises
    ------
    SystemExit
        With one sentence, if the checkpoint is of other settings.
    """
    path = folder / FILE
    if not path.exists():
        return None
    state = read(path)
    if state["digest"] != digest:
        raise SystemExit(f"{path} is of a run with other settings or data; give another --out, or move it away.")
    set_weights(model, state["model"])
    optimiser.load(state["optimiser"])
    torch.set_rng_state(state["generator"])
    return Position(**state["position"])


def read(path: Path) -> dict[str, Any]:
    """Return a checkpoint's content."""
    content: dict[str, Any] = torch.load(path, weights_only=True)
    return content


@torch.no_grad()
def set_weights(model: Hybrid, weights: dict[str, torch.Tensor]) -> None:
    """Copy weights by name into a model."""
    own = model.parameters
    assert own.keys() == weights.keys(), "the checkpoint has other parameters"
    for name, value in weights.items():
        own[name].copy_(value)
