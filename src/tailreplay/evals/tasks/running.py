"""What keeps changing: a running count and the latest value of things. Attention alone does not add up: states must."""

from __future__ import annotations

from collections.abc import Iterator

from tailreplay.evals.document import Document, Hit
from tailreplay.evals.tasks.base import Draw

COUNT_HITS, SLOT_HITS = 10, 5
_GAP = 25  # mean tokens of prose between two events
_HIGHEST = 9
_THINGS = ("door", "light", "engine", "window", "valve", "fan", "gate", "lamp")
_VALUES = ("red", "blue", "green", "black", "white", "open", "closed", "cold", "warm", "full", "empty", "broken")


def count(draw: Draw) -> Document:
    """A counter that is set, raised and lowered by one; its value is asked for at hits anywhere in the last quarter."""
    writer, value, since = draw.writer, None, 0
    hits: list[Hit] = []
    stops = _stops(writer.limit, COUNT_HITS)
    prose = _prose(draw)
    while len(hits) < COUNT_HITS:
        next(prose)
        if value is None or draw.rng.random() < 0.12:
            value = draw.rng.randint(0, _HIGHEST)
            since = writer.add(f" Set to {value}.")
        elif value == 0 or (value < _HIGHEST and draw.rng.random() < 0.5):
            value += 1
            writer.add(" Add one.")
        else:
            value -= 1
            writer.add(" Take one.")
        if len(writer.ids) >= stops[len(hits)]:
            hits.append(Hit(len(writer.ids), (writer.probe("Count:", str(value), since),)))
    return Document(tuple(writer.ids), tuple(hits))


def slots(draw: Draw) -> Document:
    """Things that change over and over; at each hit two of them are asked for."""
    writer = draw.writer
    things = draw.rng.sample(_THINGS, 6)
    now: dict[str, tuple[str, int]] = {}
    hits: list[Hit] = []
    stops = _stops(writer.limit, SLOT_HITS)
    prose = _prose(draw)
    while len(hits) < SLOT_HITS:
        next(prose)
        thing, value = draw.rng.choice(things), draw.rng.choice(_VALUES)
        now[thing] = value, writer.add(f" Now the {thing} is {value}.")
        if len(writer.ids) >= stops[len(hits)] and len(now) >= 2:
            asked = draw.rng.sample(sorted(now), 2)
            hits.append(Hit(len(writer.ids), tuple(writer.probe(f"Check {one}:", *now[one]) for one in asked)))
    return Document(tuple(writer.ids), tuple(hits))


def _stops(limit: int, hits: int) -> list[int]:
    """Where hits may come, spread over the last quarter; the last event still fits."""
    last = limit - 12
    return [last - 2 * _GAP - (limit // 4) * step // hits for step in reversed(range(hits))]


def _prose(draw: Draw) -> Iterator[None]:
    """Append a stretch of prose at each step."""
    writer = draw.writer
    texts = iter(draw.material.filler(draw.rng) * 2)
    begun = bool(writer.ids)
    while True:
        gap = draw.rng.randint(0, 2 * _GAP)
        while gap > 0 and writer.room > 12:
            more = writer.encode((" " if begun else "") + next(texts))[: min(gap, writer.room - 12)]
            writer.ids.extend(more)
            gap -= len(more)
            begun = True
        yield
