"""A running count that is kept over long gaps: what a recurrent state is for."""

from __future__ import annotations

from collections.abc import Iterator

from training.tasks.base import CHARACTERS_PER_TOKEN, Draw, Kind, Script

_HIGHEST = 9


def count(script: Script, draw: Draw, characters: int) -> None:
    """`` Set to 3.`` … `` Add one.`` … `` Take one.`` … ``Count: 3``, the counter between 0 and 9."""
    longest = (0, 0, 10, 30, 90) if characters < 1500 * CHARACTERS_PER_TOKEN else (0, 10, 30, 90, 200)
    gap = CHARACTERS_PER_TOKEN * (25 if draw.last_only else draw.random.choice(longest))
    # Often asked, it is learnt soon; seldom asked, no answer shortly before can be counted on from.
    asking = 0.0 if draw.last_only else draw.random.choice((0.06, 0.15, 0.4, 0.7))
    setting = draw.random.choice((0.06, 0.12, 0.25)) if not draw.last_only else 0.12
    filler: Iterator[str] = iter(())
    value = None
    begin = script.length
    while script.length - begin < characters - 24:
        room = draw.random.uniform(0, 2 * gap)
        while room > 20 and script.length - begin < characters - 60:
            text = next(filler, None)
            if text is None:
                filler = iter(draw.filler(int(max(400, 4 * gap))))
                continue
            # Cut, so that gaps are as long as drawn.
            text = text[: max(20, int(room))].rstrip()
            script.add(("" if script.length == begin else " ") + text, Kind.TEXT)
            room -= len(text) + 1
        if value is None or draw.random.random() < setting:
            value = draw.random.randint(0, _HIGHEST)
            script.add(f" Set to {value}.")
        elif value == 0 or (value < _HIGHEST and draw.random.random() < 0.5):
            value += 1
            script.add(" Add one.")
        else:
            value -= 1
            script.add(" Take one.")
        if draw.random.random() < asking:
            script.ask("Count: ", str(value))
    script.ask("Count: ", str(value))
