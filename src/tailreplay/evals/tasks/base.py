"""What a task is."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tailreplay.evals.document import Document, Encode, Writer
from tailreplay.evals.info import TaskInfo
from tailreplay.evals.material import Material

RESERVE = 160
"""Tokens of a length that are kept for question and answer: a document of length L has at most L - 160 tokens."""
VERSION = 1
"""Of all generators together: another one writes other documents from the same seeds."""


@dataclass(frozen=True)
class Draw:
    """What a task writes with: random choices of its own, text, and a writer."""

    rng: random.Random
    material: Material
    writer: Writer

    def names(self, count: int) -> list[str]:
        """Return different words."""
        return self.rng.sample(self.material.words, count)

    def digits(self, count: int) -> str:
        """Return a number of so many digits."""
        return "".join(self.rng.choices("0123456789", k=count))


Write = Callable[[Draw], Document]


@dataclass(frozen=True)
class Task:
    """A generator of documents, the same for each seed, length and index.

    Attributes
    ----------
    info : TaskInfo
    write : callable
        `Draw` to `Document`.
    probes : int
        Samples in each document.
    """

    info: TaskInfo
    write: Write
    probes: int

    def document(
        self, length: int, index: int, seed: int, material: Material, encode: Encode, head: tuple[int, ...] = ()
    ) -> Document:
        """Return the `index`-th document of `length` tokens, its questions and answers included."""
        rng = random.Random(f"{seed}/{self.info.name}/{length}/{index}")
        document = self.write(Draw(rng, material, Writer(encode, rng, length - RESERVE, head)))
        assert len(document.ids) <= length - RESERVE
        return document
