"""Key-value recall: a list of words with numbers, then words whose numbers are asked for."""

from __future__ import annotations

from training.tasks.base import Draw, Script
from training.tasks.lookup import Fact, fact_count, look_up


def keys(script: Script, draw: Draw, characters: int) -> None:
    """``river: 4821; garden: 1175;`` … ``Get river: 4821``."""
    low = draw.random.choice((3, 4, 5))
    # Many, so that they are too much for a recurrent state: attention is to look them up.
    names = draw.words(fact_count(draw, characters, 14, fewest=5))
    facts = []
    for name in names:
        number = draw.digits(low, low)
        facts.append(Fact(f"{name}: {number};", f"Get {name}: ", number))
    look_up(script, draw, characters, facts, spread=0.5)
