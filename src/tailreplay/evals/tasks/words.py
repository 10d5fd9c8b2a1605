"""Counting words over the whole document (RULER's common and frequent words)."""

from __future__ import annotations

from collections import Counter

from tailreplay.evals.document import Document, Hit
from tailreplay.evals.tasks.base import Draw

HITS = 5


def common_words(draw: Draw) -> Document:
    """Three words come six times as often as the others; which?"""
    return _list_of_words(draw, [6.0] * 3 + [1.0] * 60)


def frequent_words(draw: Draw) -> Document:
    """Words by Zipf's law; the three most frequent?"""
    return _list_of_words(draw, [1 / (rank + 1) ** 1.2 for rank in range(60)])


def _list_of_words(draw: Draw, weights: list[float]) -> Document:
    words = draw.names(len(weights))
    writer = draw.writer
    writer.add("Words:")
    counts: Counter[str] = Counter()
    hits = []
    stops = [writer.limit - 12 - writer.limit // 20 * step for step in reversed(range(HITS))]
    for stop in stops:
        while len(writer.ids) < stop:
            _append(draw, counts, draw.rng.choices(words, weights)[0])
        # A tie would have no right answer: the third word once more, until it is ahead of the fourth.
        while len(set(sorted(counts.values(), reverse=True)[2:4])) < 2:
            _append(draw, counts, _ranked(counts)[2])
        found = _ranked(counts)[:3]
        end = len(writer.ids)
        hits.append(Hit(end, (writer.probe("Three most frequent words:", ", ".join(found), None, *found),)))
    return Document(tuple(writer.ids), tuple(hits))


def _append(draw: Draw, counts: Counter[str], word: str) -> None:
    draw.writer.add(f" {word}")
    counts[word] += 1


def _ranked(counts: Counter[str]) -> list[str]:
    return sorted(counts, key=lambda word: (-counts[word], word))
