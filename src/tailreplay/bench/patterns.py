"""Patterns of prompts that users of prefix caches suffer from, each a few lines."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

FIRST_TOKEN, LAST_TOKEN = 16, 2000
"""Ids that prompts are made of: the bundled model has 2,048, of which the first few are special."""
_STARTS = 40


@dataclass(frozen=True)
class Answer:
    """A place in a prompt for what the server answered to an earlier request of the same pattern.

    Attributes
    ----------
    of : int
        Which request, counted from the pattern's first.
    begin, end : int or None
        Which part of the answer, as in a slice.
    """

    of: int
    begin: int | None = None
    end: int | None = None

    def cut(self, length: int) -> int:
        """Return how many of an answer's `length` tokens are taken."""
        return len(range(length)[self.begin : self.end])


Part = tuple[int, ...] | Answer
Prompt = tuple[Part, ...]
Waves = list[list[Prompt]]
"""Prompts of a wave are sent at once, the next wave when all of them are answered."""


class Draw:
    """Fresh tokens of one pattern; the same for the same seed and place.

    Each run of tokens begins with another one, and no other place begins with those: runs share nothing by chance where
    they follow the same tokens.

    Parameters
    ----------
    place : int
        Which of the patterns (and repeats) it is; there is room for 49 until beginnings come again.
    scale : float
        Multiplies all lengths.
    """

    def __init__(self, seed: int, place: int = 0, scale: float = 1.0) -> None:
        self.random = random.Random(f"{seed} {place}")
        self._scale = scale
        starts = list(range(FIRST_TOKEN, LAST_TOKEN))
        random.Random(seed).shuffle(starts)
        at = place * _STARTS % (len(starts) - _STARTS)
        self._starts = starts[at : at + _STARTS]
        self._runs = 0

    def __call__(self, tokens: int) -> tuple[int, ...]:
        """Return about ``tokens * scale`` fresh tokens, at least one."""
        first = self._starts[self._runs % _STARTS]
        self._runs += 1
        more = max(round(tokens * self._scale), 1) - 1
        return first, *(self.random.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(more))


def shared_prefix(draw: Draw) -> Waves:
    """1,500 shared of 2,200 tokens, then different tails."""
    prefix = draw(1500)
    return _in_turn((prefix, draw(700)) for _ in range(4))


def same_prompt(draw: Draw) -> Waves:
    """The same long prompt three times."""
    return _in_turn([(draw(4000),)] * 3)


def short_system(draw: Draw) -> Waves:
    """A system prompt of 48 tokens, shorter than any block, before different questions."""
    system = draw(48)
    return _in_turn((system, draw(150)) for _ in range(6))


def tiny_system(draw: Draw) -> Waves:
    """The same with 16 tokens: less than tailreplay looks for (`min_match`)."""
    system = draw(16)
    return _in_turn((system, draw(150)) for _ in range(6))


def chat(draw: Draw) -> Waves:
    """A chat of six turns that grows by answers and questions."""
    prompt: Prompt = (draw(1000),)
    turns = [prompt]
    for turn in range(5):
        prompt = (*prompt, Answer(turn), draw(120))
        turns.append(prompt)
    return _in_turn(turns)


def thinking(draw: Draw) -> Waves:
    """A chat in which the middle of each answer, its thinking, is missing from the history of the next turn."""
    prompt: Prompt = (draw(1000),)
    turns = [prompt]
    for turn in range(5):
        prompt = (*prompt, Answer(turn, 0, 3), Answer(turn, -9, None), draw(120))
        turns.append(prompt)
    return _in_turn(turns)


def regenerate(draw: Draw) -> Waves:
    """The same prompt again, twice, then a shorter one that is its beginning."""
    prompt, rest = draw(900), draw(500)
    return _in_turn([(prompt, rest), (prompt, rest), (prompt, rest), (prompt,)])


def agents(draw: Draw) -> Waves:
    """Five agents at once (one more than four slots) that branch off one long prefix and go on, three steps each."""
    prefix = draw(3000)
    waves: Waves = [[(prefix, draw(100))]]
    steps: list[Prompt] = [(prefix, draw(200)) for _ in range(5)]
    waves.append(steps)
    for step in range(2):
        first = 1 + 5 * step
        steps = [(*prompt, Answer(first + agent), draw(100)) for agent, prompt in enumerate(steps)]
        waves.append(steps)
    return waves


def burst(draw: Draw) -> Waves:
    """Five prompts at once with a prefix that nobody asked for before: one has to compute it, four could wait for it."""
    prefix = draw(2000)
    return [[(prefix, draw(100)) for _ in range(5)]]


def middle(draw: Draw) -> Waves:
    """Branches off random tokens in the middle of one prompt."""
    prompt = draw(2500)
    cuts = [draw.random.randrange(len(prompt) // 5, len(prompt)) for _ in range(4)]
    return _in_turn([(prompt,), *((prompt[:cut], draw(200)) for cut in cuts)])


def unique(draw: Draw) -> Waves:
    """Prompts that share nothing."""
    return _in_turn((draw(1200),) for _ in range(6))


def shorter(draw: Draw) -> Waves:
    """The first 2,000 tokens of a cached prompt of 4,000, three times."""
    first, rest = draw(2000), draw(2000)
    return _in_turn([(first, rest), (first,), (first,), (first,)])


PATTERNS: dict[str, Callable[[Draw], Waves]] = {
    "shared-prefix": shared_prefix,
    "same-prompt": same_prompt,
    "short-system": short_system,
    "tiny-system": tiny_system,
    "chat": chat,
    "thinking": thinking,
    "regenerate": regenerate,
    "shorter": shorter,
    "agents": agents,
    "burst": burst,
    "middle": middle,
    "unique": unique,
}


def longest(waves: Waves, max_tokens: int) -> int:
    """Return the tokens of the longest prompt of a pattern and its answer."""
    return max(sum(_length(part, max_tokens) for part in prompt) for wave in waves for prompt in wave) + max_tokens


def resolve(prompt: Prompt, answers: Sequence[Sequence[int]]) -> list[int]:
    """Return a prompt's tokens, with the answers in their places."""
    tokens: list[int] = []
    for part in prompt:
        tokens += answers[part.of][part.begin : part.end] if isinstance(part, Answer) else part
    return tokens


def _length(part: Part, max_tokens: int) -> int:
    return part.cut(max_tokens) if isinstance(part, Answer) else len(part)


def _in_turn(prompts: Iterable[Prompt]) -> Waves:
    return [[prompt] for prompt in prompts]
