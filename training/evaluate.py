"""What a model can do: exact answers by task and length on held-out text and words, and what a cut takes away."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from training.model import Cut, Hybrid
from training.stream import Encoded, encode
from training.tasks.base import CHARACTERS_PER_TOKEN, Draw, Material, Script
from training.tasks.registry import TASKS

ASKED = ("keys", "needle", "variables", "count", "slots", "words", "repeat", "lines", "chat")
"""Tasks with a question."""


@dataclass(frozen=True)
class Loss:
    """What is cut off before a question.

    Attributes
    ----------
    name : str
    states, kv : bool
        As in `training.model.Cut`.
    inside : bool
        The boundary is two tokens before the answer, inside the question; else it is before the question.
    """

    name: str
    states: bool = False
    kv: bool = False
    inside: bool = False


NOTHING = Loss("full")
WIPED = Loss("KV wiped", kv=True)
LOSSES = (
    NOTHING,
    Loss("zero states", states=True),
    Loss("zero states inside the question", states=True, inside=True),
    WIPED,
    Loss("both", states=True, kv=True),
)


class Examiner:
    """Asks questions of a fixed set: the same for each model and moment.

    Parameters
    ----------
    folder : Path
        The data folder.
    split : {"valid", "train"}
    """

    def __init__(self, folder: Path, split: str = "valid") -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.material = Material(folder, split)

    def question(self, task: str, length: int, index: int) -> Encoded:
        """A text of at most `length` tokens that ends in a question and its answer; `span` of its last is set."""
        whole = length * CHARACTERS_PER_TOKEN
        for attempt in range(20):
            script = Script()
            draw = Draw(random.Random(f"examination/{task}/{length}/{index}/{attempt}"), self.material, last_only=True)
            TASKS[task](script, draw, int(whole))
            encoded = encode(self.tokenizer, script)
            if len(encoded.ids) <= length and len(script.questions) == 1:
                self._span = encoded.span(script.questions[0])
                return encoded
            whole *= 0.98 * length / max(len(encoded.ids), length)
        raise ValueError(f"{task} makes no text of {length} tokens")

    @torch.no_grad()
    def exact(self, model: Hybrid, task: str, length: int, samples: int, loss: Loss = NOTHING) -> float:
        """Share of questions whose whole answer, with the line's end where it has one, is the likeliest at each token.

        That is the share of answers that greedy decoding gets right.
        """
        right = 0
        for index in range(samples):
            encoded = self.question(task, length, index)
            start, answer, end = self._span
            at = answer - 2 if loss.inside else start
            cut = Cut(at, loss.states, loss.kv) if loss.states or loss.kv else None
            ids = torch.tensor([encoded.ids[:end]])
            logits = model.logits(ids[:, :-1], torch.arange(answer - 1, end - 1), cut)
            right += bool((logits.argmax(-1) == ids[0, answer:end]).all())
        return right / samples

    @torch.no_grad()
    def text(self, model: Hybrid, length: int, samples: int, loss: Loss = NOTHING) -> tuple[float, float]:
        """Mean NLL in nats of the first 8 and of all 128 tokens after a boundary at ``length - 128`` of plain text."""
        at = length - 128
        total = torch.zeros(128)
        for index in range(samples):
            draw = Draw(random.Random(f"examination/text/{length}/{index}"), self.material)
            ids = torch.tensor([self.tokenizer.encode(draw.text(int(length * 6))).ids[: length + 1]])
            assert ids.shape[1] == length + 1, "the text is too short"
            cut = Cut(at, loss.states, loss.kv) if loss.states or loss.kv else None
            logits = model.logits(ids[:, :-1], torch.arange(at, length), cut)
            total += F.cross_entropy(logits, ids[0, at + 1 :], reduction="none")
        nll = total / samples
        return float(nll[:8].mean()), float(nll.mean())


def cells(lengths: Iterable[int], tasks: Iterable[str] = ASKED) -> list[tuple[str, int]]:
    """Pairs of task and length that make sense."""
    return [(task, length) for length in lengths for task in tasks]


def error_of(share: float, samples: int) -> float:
    """Standard error of a share, with a success and a failure more so that 0 and 1 have one too."""
    p = (share * samples + 1) / (samples + 2)
    return math.sqrt(p * (1 - p) / (samples + 2))
