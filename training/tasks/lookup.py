"""The shape that look-up tasks share: facts in filler, questions about them in between or after."""

from __future__ import annotations

import math
from dataclasses import dataclass

from training.tasks.base import Draw, Script, scatter


@dataclass(frozen=True)
class Fact:
    """A statement and a question about it."""

    statement: str
    question: str
    answer: str


def fact_count(draw: Draw, characters: int, each: float, fewest: int = 2) -> int:
    """How many facts of `each` characters a text gets: log-uniform from `fewest` to what fills half of it."""
    most = max(float(fewest), 0.5 * characters / each)
    return min(250, round(math.exp(draw.random.uniform(math.log(fewest), math.log(most)))))


def look_up(
    script: Script, draw: Draw, characters: int, facts: list[Fact], spread: float = 1.0, ordered: bool = False
) -> None:
    """Append the facts in filler, with questions.

    Parameters
    ----------
    script : Script
        Appended to.
    draw : Draw
    characters : int
        Length of the whole.
    facts : list of Fact
        Facts with an empty statement are only asked about.
    spread : float
        Chance that the facts are spread over the filler, instead of a list at one place.
    ordered : bool
        Keep the order of facts.
    """
    if not ordered:
        draw.random.shuffle(facts)
    per_question = sum(len(fact.question) + len(fact.answer) + 2 for fact in facts) / len(facts)
    room = characters - sum(len(fact.statement) + 1 for fact in facts)
    if draw.last_only:
        asked, rounds = 1, 1
    else:
        asked = min(len(facts), max(1, int(room * draw.random.uniform(0.4, 0.9) / per_question)))
        rounds = min(asked, draw.random.choice((1, 1, 2, 3)))
    together = draw.random.random() >= spread
    rest = max(0, int(room - asked * per_question))
    open_facts: list[Fact] = []
    for index in range(rounds):
        share = facts[index * len(facts) // rounds : (index + 1) * len(facts) // rounds]
        filler = draw.filler(rest // rounds) if rest // rounds > 60 else []
        script.line()
        scatter(script, draw, filler, [fact.statement for fact in share if fact.statement], not together)
        open_facts += share
        draw.random.shuffle(open_facts)
        due = asked * (index + 1) // rounds - asked * index // rounds
        for fact in open_facts[:due]:
            script.ask(fact.question, fact.answer)
        open_facts = open_facts[due:]
