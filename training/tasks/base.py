"""What tasks are written with: a source of words and filler, and a script that marks what is to be learnt."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from training.corpus.clean import sentences
from training.tasks.everyday import sentence

CHARACTERS_PER_TOKEN = 3.2
"""Of our text by our tokenizer, roughly: budgets are in characters, since tasks write text and not tokens."""


class Kind(IntEnum):
    """How a token counts in the loss."""

    SILENT = 0
    """Not at all: it cannot be foreseen, or is a question's wording."""
    TEXT = 1
    """As running text."""
    ANSWER = 2
    """As an answer."""


@dataclass(frozen=True)
class Question:
    """Character offsets of a question and its answer in a script."""

    start: int
    answer: int
    end: int


@dataclass
class Script:
    """Text under construction. Methods append and return nothing."""

    parts: list[str] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    length: int = 0

    def add(self, text: str, kind: Kind = Kind.SILENT) -> None:
        """Append `text`."""
        if text:
            self.parts.append(text)
            self.kinds.append(kind)
            self.length += len(text)

    def line(self) -> None:
        """Begin a new line, unless one has just begun."""
        if self.parts and not self.parts[-1].endswith("\n"):
            self.add("\n")

    def ask(self, question: str, answer: str) -> None:
        """Append a question on a line of its own, and its answer with the line's end."""
        self.line()
        start = self.length
        self.add(question)
        self.questions.append(Question(start, self.length, self.length + len(answer) + 1))
        self.add(answer + "\n", Kind.ANSWER)

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.parts)


class Material:
    """Text and words of one split, in memory.

    Parameters
    ----------
    folder : Path
        As `training.corpus.prepare.prepare` leaves it.
    split : {"train", "valid"}
    """

    def __init__(self, folder: Path, split: str) -> None:
        text = (folder / f"{split}.txt").read_text(encoding="utf-8")
        self.documents = [document.split("\n") for document in text.split("\n\n")]
        self.words: list[str] = json.loads((folder / "words.json").read_text(encoding="utf-8"))[split]
        self._ends: list[int] = []
        total = 0
        for document in self.documents:
            total += sum(map(len, document))
            self._ends.append(total)

    def document(self, draw: random.Random) -> list[str]:
        """Return a document; longer ones are likelier, so that all text is as likely."""
        return draw.choices(self.documents, cum_weights=self._ends)[0]


@dataclass
class Draw:
    """Random choices for one sequence.

    Attributes
    ----------
    random : random.Random
    material : Material
    last_only : bool
        Ask one question, at the end: how models are evaluated.
    """

    random: random.Random
    material: Material
    last_only: bool = False

    def words(self, count: int) -> list[str]:
        """Different words of this split; beyond their number, two together."""
        pool = self.material.words
        if count <= len(pool):
            return self.random.sample(pool, count)
        return [
            *pool,
            *(f"{a} {b}" for a, b in zip(self.words(len(pool)), self.words(count - len(pool)), strict=False)),
        ]

    def digits(self, low: int, high: int) -> str:
        """A number of `low` to `high` digits; the first may be 0."""
        return "".join(self.random.choices("0123456789", k=self.random.randint(low, high)))

    def text(self, characters: int) -> str:
        """Running text of the corpus, from some paragraph on, of about so many characters."""
        found: list[str] = []
        size = 0
        while size < characters:
            document = self.material.document(self.random)
            first = self.random.randrange(len(document))
            for paragraph in document[first:]:
                found.append(paragraph)
                size += len(paragraph) + 1
                if size >= characters:
                    break
            else:
                found.append("<|endoftext|>")
        return "\n".join(found).replace("\n<|endoftext|>\n", "<|endoftext|>").removesuffix("\n<|endoftext|>")

    def filler(self, characters: int) -> list[str]:
        """Sentences of together about so many characters: of the corpus, or made up."""
        found: list[str] = []
        size = 0
        made_up = self.random.random() < 0.35
        # Now and then the same few sentences over and over: whoever tries the model out pastes such documents.
        few = [sentence(self.random) for _ in range(self.random.randint(1, 6))] if self.random.random() < 0.1 else None
        while size < characters:
            if few:
                more = self.random.choices(few, k=4)
            elif made_up:
                more = [sentence(self.random) for _ in range(8)]
            else:
                document = self.material.document(self.random)
                first = self.random.randrange(len(document))
                more = [s for paragraph in document[first : first + 8] for s in sentences(paragraph) if len(s) < 300]
            for one in more:
                found.append(one)
                size += len(one) + 1
                if size >= characters:
                    break
        return found


def scatter(script: Script, draw: Draw, filler: list[str], facts: list[str], spread: bool = True) -> None:
    """Append filler sentences with `facts` between them, in this order; together at one place if not `spread`.

    Sentences follow each other in a paragraph, each on a line, or as paragraphs.
    """
    gap = draw.random.choice((" ", " ", " ", "\n", "\n\n"))
    places = len(filler) + 1
    at = (
        sorted(draw.random.randrange(places) for _ in facts) if spread else [draw.random.randrange(places)] * len(facts)
    )
    position = 0
    for place in range(places):
        while position < len(facts) and at[position] == place:
            script.add(("" if _fresh(script) or facts[position][0] == "\n" else gap) + facts[position])
            position += 1
        if place < len(filler):
            script.add(("" if _fresh(script) else gap) + filler[place], Kind.TEXT)


def _fresh(script: Script) -> bool:
    return not script.parts or script.parts[-1].endswith("\n")
