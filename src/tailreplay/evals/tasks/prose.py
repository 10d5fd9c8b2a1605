"""Plain text: how well it is continued after a hit anywhere in it."""

from __future__ import annotations

from tailreplay.evals.document import Document, Hit, Probe
from tailreplay.evals.tasks.base import RESERVE, Draw

HITS = 10
CONTINUATION = 128
"""Tokens whose NLL is taken."""


def prose(draw: Draw) -> Document:
    """Hits at random tokens of the last quarter; the text itself is the right continuation, and nothing is generated."""
    ids = list(draw.writer.head)
    limit = draw.writer.limit
    for paragraph in draw.material.passage(draw.rng):
        ids += draw.writer.encode(paragraph + "\n")
        if len(ids) >= limit + RESERVE:
            break
    hits = []
    for at in sorted(draw.rng.sample(range(limit - limit // 4, limit), HITS)):
        # The first token after the boundary is the query: its own NLL would not depend on the hit's states alone.
        hits.append(Hit(at, (Probe((ids[at],), tuple(ids[at + 1 : at + 1 + CONTINUATION])),)))
    return Document(tuple(ids[:limit]), tuple(hits))
