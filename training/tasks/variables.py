"""Variable tracking: chains of assignments, followed back to a number."""

from __future__ import annotations

from training.tasks.base import Draw, Script
from training.tasks.lookup import Fact, fact_count, look_up


def variables(script: Script, draw: Draw, characters: int) -> None:
    """``VAR apple = 12345; VAR river = VAR apple;`` … ``Print VAR river: 12345``, or which variables have a value."""
    count = max(2, fact_count(draw, characters, 22))
    names = draw.words(count)
    size = draw.random.choice((4, 5))
    deepest = draw.random.choice((1, 2, 3, 4))
    facts: list[Fact] = []
    chains: list[tuple[str, list[str]]] = []
    while len(facts) < count:
        value = draw.digits(size, size)
        chain = names[len(facts) : len(facts) + 1 + draw.random.randint(0, deepest)]
        for depth, name in enumerate(chain):
            source = value if depth == 0 else f"VAR {chain[depth - 1]}"
            facts.append(Fact(f"VAR {name} = {source};", f"Print VAR {name}: ", value))
        chains.append((value, chain))
    if not draw.last_only and draw.random.random() < 0.15:
        facts[-1:] = [
            *facts[-1:],
            *(Fact("", f"Variables that hold {value}:", " " + ", ".join(c)) for value, c in chains),
        ]
    if draw.last_only:
        _one_question(script, draw, characters, facts)
    else:
        look_up(script, draw, characters, facts, spread=0.7, ordered=True)


def _one_question(script: Script, draw: Draw, characters: int, facts: list[Fact]) -> None:
    """About a variable whose value is at least one step away, where there is one."""
    indirect = [fact for fact in facts if "= VAR" in fact.statement] or facts
    asked = draw.random.choice(indirect)
    quiet = [Fact(fact.statement, "", "") for fact in facts]
    body = Script()
    look_up(body, draw, characters - len(asked.question) - 8, quiet, ordered=True)
    for part, kind in zip(body.parts, body.kinds, strict=True):
        if part != "\n":
            script.add(part, kind)
    script.ask(asked.question, asked.answer)
