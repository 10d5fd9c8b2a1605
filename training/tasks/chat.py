"""Questions about a pasted document, in the form that the chat template gives a conversation."""

from __future__ import annotations

from collections.abc import Callable

from training.tasks.base import Draw, Script, scatter
from training.tasks.lookup import Fact
from training.tasks.people import ANIMALS, CITIES, COLOURS, DAYS, JOBS, NAMES

_ORDERS = (
    "Answer the questions about the text.",
    "You answer questions about a document.",
    "Read the document and answer the question.",
    "Here is a document.",
)


def _city(draw: Draw, name: str) -> Fact:
    city = draw.random.choice(CITIES)
    return Fact(f"{name} lives in {city}.", f"Where does {name} live?", city)


def _job(draw: Draw, name: str) -> Fact:
    job = draw.random.choice(JOBS)
    return Fact(f"{name} works as a {job}.", f"What is the job of {name}?", job)


def _colour(draw: Draw, name: str) -> Fact:
    colour = draw.random.choice(COLOURS)
    return Fact(f"The favourite colour of {name} is {colour}.", f"What is the favourite colour of {name}?", colour)


def _animal(draw: Draw, name: str) -> Fact:
    animal = draw.random.choice(ANIMALS)
    return Fact(f"{name} has a {animal} at home.", f"Which animal does {name} have?", animal)


def _age(draw: Draw, name: str) -> Fact:
    age = str(draw.random.randint(10, 99))
    return Fact(f"{name} is {age} years old.", f"How old is {name}?", age)


def _day(draw: Draw, name: str) -> Fact:
    day = draw.random.choice(DAYS)
    return Fact(f"{name} will arrive on {day}.", f"When will {name} arrive?", day)


def _phone(draw: Draw, name: str) -> Fact:
    number = draw.digits(6, 6)
    return Fact(f"The phone number of {name} is {number}.", f"What is the phone number of {name}?", number)


def _price(draw: Draw, thing: str) -> Fact:
    price = draw.digits(2, 4)
    return Fact(f"The price of the {thing} is {price} dollars.", f"What is the price of the {thing}?", price)


def _code(draw: Draw, thing: str) -> Fact:
    code = draw.digits(4, 6)
    return Fact(f"The code for the {thing} is {code}.", f"What is the code for the {thing}?", code)


def _magic(draw: Draw, thing: str) -> Fact:
    value = draw.digits(4, 6)
    return Fact(
        f"The special magic number for {thing} is {value}.", f"What is the special magic number for {thing}?", value
    )


_OF_PEOPLE: tuple[Callable[[Draw, str], Fact], ...] = (_city, _job, _colour, _animal, _age, _day, _phone)
_OF_THINGS: tuple[Callable[[Draw, str], Fact], ...] = (_price, _code, _magic)


def chat(script: Script, draw: Draw, characters: int) -> None:
    """A document with facts about people and things, then one or more turns of question and answer."""
    most = max(3, min(60, characters // 160))
    facts = _facts(draw, draw.random.randint(3, most))
    turns = 1 if draw.last_only else min(len(facts), draw.random.randint(2, 12))
    order = draw.random.choice(_ORDERS) if draw.random.random() < 0.4 else ""
    marked = draw.random.random() < 0.75
    room = characters - sum(len(f.statement) for f in facts) - turns * 60 - len(order)
    script.line()
    if order:
        script.add(order + "\n" + ("\n" if draw.random.random() < 0.3 else ""))
    scatter(script, draw, draw.filler(max(0, room)) if room > 60 else [], [fact.statement for fact in facts])
    if draw.random.random() < 0.3:
        script.add("\n")
    draw.random.shuffle(facts)
    for fact in facts[:turns]:
        script.ask(f"{'Question: ' if marked else ''}{fact.question}\nAnswer: ", fact.answer)


def _facts(draw: Draw, count: int) -> list[Fact]:
    """Facts of which no two have the same question."""
    pairs = [(make, name) for make in _OF_PEOPLE for name in NAMES]
    pairs += [(make, thing) for make in _OF_THINGS for thing in draw.words(20)]
    return [make(draw, who) for make, who in draw.random.sample(pairs, count)]
