"""Documents for the bundled model: filler with numbers to be found again."""

from __future__ import annotations

import random
from typing import Any

_WORDS = """
the a this that some every small old green quiet river garden window house road tree bird table
letter morning evening winter summer walked looked found kept opened closed saw heard near under
over behind with without and or but then while before after slowly often never always
"""
KEYS = ("apple", "river", "stone", "window", "garden", "silver")


def filler(seed: int, sentences: int) -> str:
    """Sentences of common words, the same for the same seed."""
    draw = random.Random(seed)
    lines = (" ".join(draw.choices(_WORDS.split(), k=11)).capitalize() + "." for _ in range(sentences))
    return "\n".join(lines)


def document(seed: int, sentences: int = 60) -> tuple[str, dict[str, str]]:
    """A text with a number for each of `KEYS`, and these numbers."""
    draw = random.Random(seed)
    # Different digits: a small model counts repeated ones badly.
    numbers = {key: "".join(draw.sample("123456789", 5)) for key in KEYS}
    share = sentences // (len(KEYS) + 1)
    parts = [
        f"{filler(100 * seed + at, share)}\nThe special magic number for {key} is {number}."
        for at, (key, number) in enumerate(numbers.items())
    ]
    return "\n".join([*parts, filler(100 * seed + 99, share)]), numbers


def question(key: str) -> str:
    return f"Question: What is the special magic number for {key}?"


def ids_of(tokenizer: Any, seed: int, count: int) -> list[int]:
    """Token ids of a text of at least `count` tokens, cut there."""
    ids: list[int] = tokenizer.encode(filler(seed, count // 8))
    assert len(ids) >= count
    return ids[:count]


def branch(ids: list[int], at: int, other: list[int]) -> list[int]:
    """`ids` up to `at`, then `other`, with a first token that differs for certain."""
    rest = other[: len(ids) - at]
    if rest[0] == ids[at]:
        rest = [next(token for token in other if token != ids[at]), *rest[1:]]
    return [*ids[:at], *rest]
