"""How many tokens of a prompt an ideal cache would reuse: the longest common prefix with anything computed before."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

Units = Sequence[Hashable]


def common_prefix(a: Units, b: Units) -> int:
    """Return how many first elements two sequences share."""
    for at, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return at
    return min(len(a), len(b))


class History:
    """Everything that a server has computed. Brute force on purpose: it is what caches are judged by."""

    def __init__(self) -> None:
        self._sequences: list[Units] = []

    def ideal(self, prompt: Units) -> int:
        """Return how many tokens of `prompt` were computed before, without the last: something must be left to run."""
        shared = max((common_prefix(known, prompt) for known in self._sequences), default=0)
        return max(min(shared, len(prompt) - 1), 0)

    def add(self, prompt: Units, answer: Units = ()) -> None:
        """Remember a prompt and its answer; the last sampled token was never computed."""
        self._sequences.append([*prompt, *answer[:-1]])
