"""Numbered lines: repeat the words of one."""

from __future__ import annotations

from training.tasks.base import Draw, Script
from training.tasks.lookup import Fact, fact_count, look_up


def lines(script: Script, draw: Draw, characters: int) -> None:
    """``line 412: garden red boat`` … ``Repeat line 412: garden red boat``."""
    count = min(fact_count(draw, characters, 26), 800)
    facts = []
    for label in draw.random.sample(range(10, 1000), count):
        words = " ".join(draw.words(draw.random.randint(2, 4)))
        facts.append(Fact(f"\nline {label}: {words}", f"Repeat line {label}:", f" {words}"))
    look_up(script, draw, characters, facts, spread=0.5)
