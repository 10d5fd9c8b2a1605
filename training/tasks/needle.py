"""Needles in a haystack: one or many, with one value or several."""

from __future__ import annotations

from training.tasks.base import Draw, Script
from training.tasks.lookup import Fact, fact_count, look_up

_STATEMENTS = (
    "The special magic number for {key} is {value}.",
    "One of the special magic numbers for {key} is: {value}.",
    "The secret code of {key} is {value}.",
)
_QUESTIONS = (
    ("Question: What is the special magic number for {key}?\nAnswer: ", 0),
    ("Question: What is the special magic number for {key} mentioned in the text?\nAnswer: ", 1),
    ("The special magic number for {key} mentioned above is: ", 1),
    ("Question: What is the secret code of {key}?\nAnswer: ", 2),
)
_SEVERAL = (
    ("Question: What are all the special magic numbers for {key}?\nAnswer: ", 1),
    ("Question: List every special magic number for {key}.\nAnswer: ", 1),
)


def needle(script: Script, draw: Draw, characters: int) -> None:
    """``The special magic number for apple is 48213.`` … ``What is the special magic number for apple?``."""
    if not draw.last_only and draw.random.random() < 0.2:
        _several_values(script, draw, characters)
        return
    question, form = draw.random.choice(_QUESTIONS)
    # The forms' first two are asked for in the same words.
    statement = _STATEMENTS[form if form == 2 else draw.random.randrange(2)]
    count = fact_count(draw, characters, 60)
    if draw.random.random() < 0.25:
        count = 1
    size = draw.random.choice((4, 5, 5, 6, 7))
    facts = []
    for key in draw.words(count):
        value = draw.digits(size, size)
        facts.append(Fact(statement.format(key=key, value=value), question.format(key=key), value))
    look_up(script, draw, characters, facts)


def _several_values(script: Script, draw: Draw, characters: int) -> None:
    question, form = draw.random.choice(_SEVERAL)
    facts = []
    for key in draw.words(max(1, fact_count(draw, characters, 220))):
        values = [draw.digits(4, 4) for _ in range(draw.random.randint(2, 4))]
        statement = " ".join(_STATEMENTS[form].format(key=key, value=value) for value in values[:-1])
        facts.append(Fact(statement, question.format(key=key), ", ".join(values)))
        facts.append(Fact(_STATEMENTS[form].format(key=key, value=values[-1]), "", ""))
    # In order: a key's last value comes some filler after its others.
    asked = [fact for fact in facts if fact.question]
    body = Script()
    look_up(body, draw, characters - 70 * len(asked), [Fact(f.statement, "", "") for f in facts], ordered=True)
    for part, kind in zip(body.parts, body.kinds, strict=True):
        if part != "\n":
            script.add(part, kind)
    draw.random.shuffle(asked)
    for fact in asked:
        script.ask(fact.question, fact.answer)
