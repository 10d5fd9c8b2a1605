"""Batches of a run. Each is a function of the seed and the step alone, so a run goes on where it stopped."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.corpus.tokens import END
from training.settings import Stage
from training.tasks.base import CHARACTERS_PER_TOKEN, Draw, Kind, Material, Question, Script
from training.tasks.registry import TASKS

NAMES = tuple(TASKS)


@dataclass(frozen=True)
class Batch:
    """One rank's part of a step.

    Attributes
    ----------
    ids, targets : Tensor, shape (rows, length), int64
    kinds : Tensor, shape (rows, length), int8
        Of the targets, as `training.tasks.base.Kind`.
    tasks : Tensor, shape (rows,), int64
        Index into `NAMES`.
    """

    ids: Tensor
    targets: Tensor
    kinds: Tensor
    tasks: Tensor


@dataclass(frozen=True)
class Encoded:
    """A script in tokens.

    Attributes
    ----------
    ids : list of int
    ends : ndarray
        Where each token ends, in characters.
    kinds : ndarray, int8
    """

    ids: list[int]
    ends: np.ndarray
    kinds: np.ndarray

    def token_at(self, character: int) -> int:
        """Index of the token that holds a character."""
        return int(np.searchsorted(self.ends, character, side="right"))

    def span(self, question: Question) -> tuple[int, int, int]:
        """Tokens where a question starts, its answer starts, and its answer ends."""
        return self.token_at(question.start), self.token_at(question.answer), self.token_at(question.end - 1) + 1


def encode(tokenizer: Tokenizer, script: Script) -> Encoded:
    """Return a script's tokens; a token counts as the part that it ends in."""
    encoding = tokenizer.encode(script.text)
    ends = np.array([end for _, end in encoding.offsets])
    bounds = np.cumsum([len(part) for part in script.parts])
    kinds = np.array(script.kinds, np.int8)[np.searchsorted(bounds, ends, side="left")]
    return Encoded(encoding.ids, ends, kinds)


class Stream:
    """Makes batches from text on disk.

    Parameters
    ----------
    folder : Path
        As `training.corpus.prepare.prepare` leaves it.
    seed : int
    rank, ranks : int
        Ranks see different sequences of one length.
    """

    def __init__(self, folder: Path, seed: int, rank: int = 0, ranks: int = 1) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.material = Material(folder, "train")
        self.seed, self.rank, self.ranks = seed, rank, ranks

    def batch(self, stage: Stage, step: int) -> Batch:
        """Return this rank's batch of a step."""
        draw = random.Random(f"{self.seed}/{step}/length")
        length = draw.choices(list(stage.lengths), list(stage.lengths.values()))[0]
        rows = stage.tokens_per_step // self.ranks // length
        made = [self._row(stage, length, f"{self.seed}/{step}/{self.rank}/{row}") for row in range(rows)]
        ids = torch.tensor([encoded.ids[: length + 1] for _, encoded in made])
        kinds = torch.from_numpy(np.stack([encoded.kinds[1 : length + 1] for _, encoded in made]))
        return Batch(ids[:, :-1], ids[:, 1:], kinds, torch.tensor([task for task, _ in made]))

    def _row(self, stage: Stage, length: int, seed: str) -> tuple[int, Encoded]:
        """One task's text, several in a row if they are short, cut to ``length + 1`` tokens."""
        draw = Draw(random.Random(seed), self.material)
        name = draw.random.choices(list(stage.tasks), list(stage.tasks.values()))[0]
        parts = 1 if length <= 256 or draw.random.random() < 0.8 else draw.random.randint(2, 4)
        whole = int(length * CHARACTERS_PER_TOKEN)
        script = Script()
        for _ in range(parts):
            TASKS[name](script, draw, whole // parts)
            script.add(END)
        while len((encoded := encode(self.tokenizer, script)).ids) <= length:
            missing = int((length + 8 - len(encoded.ids)) * CHARACTERS_PER_TOKEN) + 40
            # Text rather than a task of some other length: what is cut off is then no question.
            TASKS["text"](script, draw, missing)
            script.add(END)
        return NAMES.index(name), encoded


def answered(batch: Batch) -> Tensor:
    """Indices of the flattened targets that the loss counts."""
    return torch.nonzero(batch.kinds.flatten() != Kind.SILENT).flatten()
