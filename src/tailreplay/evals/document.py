"""Documents with questions: what a task hands to the measurement, in token ids."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Probe:
    """One thing asked after a hit.

    Attributes
    ----------
    query : tuple of int
        Tokens that the model reads after the cached prefix; at least one.
    reference : tuple of int
        The right continuation, whose NLL is taken.
    answers : tuple of str
        What a generated answer must contain, each; empty if nothing is generated.
    evidence : int or None
        Index of the first prefix token of the earliest fact that the answer depends on: the answer is inside a tail if
        that is.
    """

    query: tuple[int, ...]
    reference: tuple[int, ...]
    answers: tuple[str, ...] = ()
    evidence: int | None = None

    @property
    def longest(self) -> int:
        """Tokens that a generated answer may take."""
        return answer_limit(len(self.reference))


def answer_limit(reference: int) -> int:
    """Return how many tokens an answer may take where the right one takes `reference`: room for a few words around it."""
    return 2 * reference + 12


@dataclass(frozen=True)
class Hit:
    """A boundary: the cached prefix is the document's first `at` tokens and then `extra`."""

    at: int
    probes: tuple[Probe, ...]
    extra: tuple[int, ...] = ()

    @property
    def matched(self) -> int:
        """Tokens of the cached prefix."""
        return self.at + len(self.extra)


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation: what is asked, what the answer must contain, and how many tokens it may take."""

    query: tuple[int, ...]
    answers: tuple[str, ...]
    longest: int


@dataclass(frozen=True)
class Document:
    """A context and where it is hit: by questions that do not know of each other, or by the turns of one conversation.

    Attributes
    ----------
    ids : tuple of int
    hits : tuple of Hit
        Ordered by `Hit.at`.
    turns : tuple of Turn
        Instead of hits.
    """

    ids: tuple[int, ...]
    hits: tuple[Hit, ...] = ()
    turns: tuple[Turn, ...] = ()

    def thinned(self, count: int) -> Document:
        """Return the document with at most so many of its hits, spread over them."""
        every = -(-len(self.hits) // count)
        return replace(self, hits=self.hits[::every])


@dataclass
class Writer:
    """A document under construction, with a limit.

    Attributes
    ----------
    encode : callable
        Text to token ids, without special tokens. Each piece is encoded by itself, so pieces begin with a space, where
        tokenizers cut anyway.
    limit : int
        Longest document, in tokens.
    head : tuple of int
        What the model's prompts begin with, if anything.
    """

    encode: Encode
    rng: random.Random
    limit: int
    head: tuple[int, ...] = ()
    ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.ids = list(self.head)

    @property
    def fresh(self) -> bool:
        """Whether nothing has been written."""
        return len(self.ids) == len(self.head)

    @property
    def room(self) -> int:
        """Tokens that still fit."""
        return self.limit - len(self.ids)

    def add(self, text: str) -> int:
        """Append `text`, cut at the limit; returns the index of its first token. Mutates self."""
        start = len(self.ids)
        self.ids.extend(self.encode(text)[: self.room])
        return start

    def fill(self, text: str, most: int) -> int:
        """Append at most so many tokens of a sentence, after a space unless it is the first; returns their number."""
        more = self.encode(text if self.fresh else " " + text)[:most]
        self.ids.extend(more)
        return len(more)

    def scatter(self, facts: list[str], filler: Iterable[str], ordered: bool = False) -> list[int]:
        """Append filler up to the limit, with `facts` at random places in it. Mutates self.

        Parameters
        ----------
        filler : iterable of str
            Sentences, without an end.

        Returns
        -------
        list of int
            Index of each fact's first token.
        """
        pieces = [self.encode(" " + fact) for fact in facts]
        room = self.room - sum(map(len, pieces))
        if room < 0:
            raise ValueError("The facts alone are longer than the document.")
        places = [self.rng.randint(0, room) for _ in facts]
        order = sorted(range(len(facts)), key=lambda index: places[index])
        if ordered:
            order = list(range(len(facts)))
        places.sort()
        starts = [0] * len(facts)
        facts_added, filled = 0, 0
        texts = iter(filler)
        while facts_added < len(facts) or filled < room:
            if facts_added < len(facts) and filled >= places[facts_added]:
                fact = order[facts_added]
                starts[fact] = len(self.ids)
                self.ids.extend(pieces[fact])
                facts_added += 1
                continue
            filled += self.fill(next(texts), room - filled)
        return starts

    def turn(self, question: str, answer: str) -> Turn:
        """Return a turn that asks `question`, which begins with a new line and ends with a colon."""
        query, reference = self._split(question, answer)
        return Turn(query, (answer,), answer_limit(len(reference)))

    def probe(self, question: str, answer: str, evidence: int | None, *answers: str, before: str = "") -> Probe:
        """Return a probe on a line of its own; `question` ends with a colon.

        `before` ends the line before it: tokenizers join a full stop and a line's end, so both belong to the query.
        """
        query, reference = self._split(f"{before}\n{question}", answer)
        return Probe(query, reference, answers or (answer,), evidence)

    def _split(self, question: str, answer: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Encode both together and cut where the answer begins.

        Where a tokenizer makes the space before the answer a token of its own, that belongs to the query.
        """
        whole = self.encode(f"{question} {answer}")
        asked = self.encode(question + " ")
        cut = next((at for at, (a, b) in enumerate(zip(whole, asked, strict=False)) if a != b), len(asked))
        return tuple(whole[:cut]), tuple(whole[cut:])
