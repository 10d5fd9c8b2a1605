"""Questions about a document: facts about people in prose, asked in plain words (RULER's QA, made up)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tailreplay.evals.document import Document, Hit
from tailreplay.evals.tasks.base import Draw

QUESTIONS, TURNS = 10, 10
_NAMES = (
    "Alice Anna Ben Carl Carol Clara David Emma Eric Eva Frank George Grace Helen Henry Ida Jack James Jane John Julia "
    "Karl Laura Leo Lisa Lucy Mark Martin Mary Max Nina Oliver Oscar Paul Peter Rosa Sarah Simon Sophie Thomas Tom Victor"
).split()
_CITIES = "Berlin London Paris Rome Madrid Vienna Prague Dublin Oslo Athens Lisbon Warsaw Moscow Cairo Tokyo".split()
_JOBS = "doctor baker teacher farmer sailor painter writer driver lawyer nurse singer cook tailor gardener".split()
_COLOURS = "red blue green yellow black white brown grey orange purple".split()
_ANIMALS = "dog cat horse rabbit parrot goat sheep duck turtle mouse".split()


@dataclass(frozen=True)
class _Fact:
    statement: str
    question: str
    answer: str


_Make = Callable[[Draw, str], _Fact]


def _choice(statement: str, question: str, values: list[str]) -> _Make:
    def make(draw: Draw, name: str) -> _Fact:
        value = draw.rng.choice(values)
        return _Fact(statement.format(name=name, value=value), question.format(name=name), value)

    return make


def _phone(draw: Draw, name: str) -> _Fact:
    number = draw.digits(6)
    return _Fact(f"The phone number of {name} is {number}.", f"What is the phone number of {name}?", number)


_MAKERS: tuple[_Make, ...] = (
    _choice("{name} lives in {value}.", "Where does {name} live?", _CITIES),
    _choice("{name} works as a {value}.", "What is the job of {name}?", _JOBS),
    _choice("The favourite colour of {name} is {value}.", "What is the favourite colour of {name}?", _COLOURS),
    _choice("{name} has a {value} at home.", "Which animal does {name} have?", _ANIMALS),
    _phone,
)


def document_qa(draw: Draw) -> Document:
    """Ten questions about a document, each a hit of its own."""
    facts, starts = _written(draw)
    probes = [
        draw.writer.probe(f"Question: {fact.question}\nAnswer:", fact.answer, start)
        for fact, start in zip(facts, starts, strict=True)
    ]
    ids = tuple(draw.writer.ids)
    return Document(ids, (Hit(len(ids), tuple(draw.rng.sample(probes, QUESTIONS))),))


def mid_question(draw: Draw) -> Document:
    """Hits that end inside a question, two tokens before its answer: the states must know what is asked.

    So does a repeated prompt, a regenerated answer, or a prefix that is matched to its last token but one.
    """
    facts, starts = _written(draw)
    ids = tuple(draw.writer.ids)
    hits = []
    for index in draw.rng.sample(range(len(facts)), QUESTIONS):
        probe = draw.writer.probe(f"Question: {facts[index].question}\nAnswer:", facts[index].answer, None)
        left = replace(probe, query=probe.query[-2:], evidence=starts[index])
        hits.append(Hit(len(ids), (left,), extra=probe.query[:-2]))
    return Document(ids, tuple(hits))


def chat(draw: Draw) -> Document:
    """A conversation of ten turns about a document, each a hit on all before it, generated answers included."""
    facts, _ = _written(draw, draw.writer.limit - TURNS * 40)
    asked = draw.rng.sample(facts, TURNS)
    turns = tuple(draw.writer.turn(f"\nQuestion: {fact.question}\nAnswer:", fact.answer) for fact in asked)
    return Document(tuple(draw.writer.ids), turns=turns)


def counting_chat(draw: Draw) -> Document:
    """A conversation of ten turns in which a count goes on: each turn changes it and asks for it."""
    writer, rng = draw.writer, draw.rng
    value = rng.randint(3, 6)
    texts = draw.material.filler(rng)
    begin = writer.encode(f" Set to {value}.")
    room = writer.limit - TURNS * 60 - len(begin) - len(writer.ids)
    while room > 0:
        room -= writer.fill(next(texts), room)
    writer.ids.extend(begin)
    turns = []
    for _ in range(TURNS):
        up = value == 0 or (value < 9 and rng.random() < 0.5)
        value += 1 if up else -1
        step = " Add one." if up else " Take one."
        turns.append(writer.turn("\n" + " ".join(next(texts).split()[:15]) + step + "\nCount:", str(value)))
    return Document(tuple(writer.ids), turns=tuple(turns))


def _written(draw: Draw, limit: int | None = None) -> tuple[list[_Fact], list[int]]:
    """Write a document of facts and prose; returns the facts and where each ends."""
    writer = draw.writer
    if limit is not None:
        writer.limit = limit
    count = max(QUESTIONS, min(60, writer.limit // 40))
    pairs = [(make, name) for make in _MAKERS for name in _NAMES]
    facts = [make(draw, name) for make, name in draw.rng.sample(pairs, count)]
    return facts, writer.scatter([fact.statement for fact in facts], draw.material.filler(draw.rng))
