"""What keeps changing: a running count and the latest value of things. Attention alone does not add up: states must."""

from __future__ import annotations

from collections.abc import Iterator

from tailreplay.evals.document import Document, Hit
from tailreplay.evals.tasks.base import Draw

COUNT_HITS, SLOT_HITS = 10, 5
_GAP = 25  # mean tokens of prose between two events
_EVENT = 12  # tokens that an event takes, at most
_HIGHEST = 9
_THINGS = ("door", "light", "engine", "window", "valve", "fan", "gate", "lamp")
_VALUES = ("red", "blue", "green", "black", "white", "open", "closed", "cold", "warm", "full", "empty", "broken")


def count(draw: Draw) -> Document:
    """A counter that is set, raised and lowered by one; its value is asked for after events of the last third."""
    writer = draw.writer
    value, since = -1, 0
    hits = []
    for _ in _stretches(draw):
        if value < 0 or draw.rng.random() < 0.12:
            value = draw.rng.randint(0, _HIGHEST)
            since = writer.add(f" Set to {value}")
        elif value == 0 or (value < _HIGHEST and draw.rng.random() < 0.5):
            value += 1
            writer.add(" Add one")
        else:
            value -= 1
            writer.add(" Take one")
        hits.append(Hit(len(writer.ids), (writer.probe("Count:", str(value), since, before="."),)))
        writer.add(".")
    return Document(tuple(writer.ids), _late(draw, hits, COUNT_HITS))


def slots(draw: Draw) -> Document:
    """Things that change over and over; after some of the last third's changes two of them are asked for."""
    writer = draw.writer
    things = draw.rng.sample(_THINGS, 6)
    now: dict[str, tuple[str, int]] = {}
    hits: list[Hit] = []
    for _ in _stretches(draw):
        thing, value = draw.rng.choice(things), draw.rng.choice(_VALUES)
        now[thing] = value, writer.add(f" Now the {thing} is {value}")
        asked = draw.rng.sample(sorted(now), min(2, len(now)))
        probes = tuple(writer.probe(f"Check {one}:", *now[one], before=".") for one in asked)
        hits.append(Hit(len(writer.ids), probes))
        writer.add(".")
    return Document(tuple(writer.ids), _late(draw, hits, SLOT_HITS))


def _late(draw: Draw, hits: list[Hit], count: int) -> tuple[Hit, ...]:
    late = hits[-max(count, len(hits) // 3) :]
    return tuple(sorted(draw.rng.sample(late, count), key=lambda hit: hit.at))


def _stretches(draw: Draw) -> Iterator[None]:
    """Append stretches of prose, one at each step, while an event still fits after it."""
    writer = draw.writer
    texts = draw.material.filler(draw.rng)
    while writer.room > _EVENT:
        gap = min(draw.rng.randint(0, 2 * _GAP), writer.room - _EVENT)
        while gap > 0:
            gap -= writer.fill(next(texts), gap)
        yield
