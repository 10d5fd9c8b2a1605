"""Which words of a long list are frequent."""

from __future__ import annotations

from collections import Counter

from training.tasks.base import Draw, Script


def words(script: Script, draw: Draw, characters: int) -> None:
    """``Words: river boat river …`` … ``Most frequent word: river``, or the three most frequent."""
    size = max(8, (characters - 90) // 8)
    several = draw.random.random() < 0.5
    common = draw.words(3 if several else 1)
    share = draw.random.uniform(0.12, 0.25)
    others = [word for word in draw.words(max(4, min(200, size // 4))) if word not in common]
    drawn = [draw.random.choice(common if draw.random.random() < share * len(common) else others) for _ in range(size)]
    counts = Counter(drawn)
    found = sorted(counts, key=lambda word: (-counts[word], word))[: len(common)]
    script.line()
    script.add("Words: " + " ".join(drawn) + ".")
    if several:
        script.ask("Three most frequent words:", " " + ", ".join(found))
    else:
        script.ask("Most frequent word:", f" {found[0]}")
