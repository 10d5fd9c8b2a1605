"""The latest value of things that keep changing."""

from __future__ import annotations

from collections.abc import Iterator

from training.tasks.base import CHARACTERS_PER_TOKEN, Draw, Kind, Script

THINGS = ("door", "light", "engine", "window", "valve", "fan", "gate", "lamp")
VALUES = ("red", "blue", "green", "black", "white", "open", "closed", "cold", "warm", "full", "empty", "broken")


def slots(script: Script, draw: Draw, characters: int) -> None:
    """`` Now the door is red.`` … `` Now the door is cold.`` … ``Check door: cold``."""
    things = draw.random.sample(THINGS, draw.random.randint(2, len(THINGS)))
    gap = CHARACTERS_PER_TOKEN * (25 if draw.last_only else draw.random.choice((8, 20, 45)))
    asking = 0.0 if draw.last_only else draw.random.choice((0.1, 0.3, 0.7))
    now: dict[str, str] = {}
    filler: Iterator[str] = iter(())
    begin = script.length
    while script.length - begin < characters - 40:
        room = draw.random.uniform(0, 2 * gap)
        while room > 20 and script.length - begin < characters - 90:
            text = next(filler, None)
            if text is None:
                filler = iter(draw.filler(int(max(400, 6 * gap))))
                continue
            script.add(("" if script.length == begin else " ") + text, Kind.TEXT)
            room -= len(text) + 1
        thing, value = draw.random.choice(things), draw.random.choice(VALUES)
        now[thing] = value
        script.add(f" Now the {thing} is {value}.")
        if draw.random.random() < asking:
            asked = draw.random.choice(list(now))
            script.ask(f"Check {asked}:", f" {now[asked]}")
    asked = draw.random.choice(list(now))
    script.ask(f"Check {asked}:", f" {now[asked]}")
