"""What prompts are made of: token ids, or words for servers that take text only. Ideals are counted in the same."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any, Protocol

from tailreplay.bench.endpoint import Answered, Endpoint
from tailreplay.bench.ideals import History
from tailreplay.bench.patterns import FIRST_TOKEN, LAST_TOKEN

_SYLLABLES = ("ba", "de", "fo", "gu", "ki", "la", "me", "no", "pu", "ri", "sa", "te", "vo")
_PIECE = re.compile(r"\s*\S+|\s+$")


class Wording(Protocol):
    """Turns prompts of token ids into what one server is sent, and says what of them could be reused."""

    note: str

    def start(self, tokens: Sequence[int]) -> list[Any]:
        """Return the pieces of fresh tokens."""
        ...

    def answer(self, answered: Answered, max_tokens: int, seed: str) -> list[Any]:
        """Return the pieces of an answer, for later prompts."""
        ...

    def send(self, pieces: list[Any]) -> list[int] | str:
        """Return the prompt that is sent."""
        ...

    async def ideal(self, pieces: list[Any]) -> tuple[int, int]:
        """Return how much of a prompt was computed before, and of how much, and remember the prompt."""
        ...

    async def remember(self, pieces: list[Any], answered: Answered) -> None:
        """Remember a prompt's answer."""
        ...


class TokenIds:
    """Prompts are token ids. Answers are those that the server tells; else made-up ones stand for them."""

    def __init__(self) -> None:
        self.note = ""
        self._history = History()

    def start(self, tokens: Sequence[int]) -> list[Any]:
        """Return the tokens."""
        return list(tokens)

    def answer(self, answered: Answered, max_tokens: int, seed: str) -> list[Any]:
        """Return the answer's tokens."""
        if answered.tokens is not None:
            return list(answered.tokens)
        self.note = "answers' token ids are not told: later prompts hold made-up ones, which no cache can have"
        draw = random.Random(seed)
        return [draw.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(max_tokens)]

    def send(self, pieces: list[Any]) -> list[int] | str:
        """Return the tokens."""
        return pieces

    async def ideal(self, pieces: list[Any]) -> tuple[int, int]:
        """Return the tokens that were computed before, and all."""
        shared = self._history.ideal(pieces)
        self._history.add(pieces)
        return shared, len(pieces)

    async def remember(self, pieces: list[Any], answered: Answered) -> None:
        """Remember the answer's tokens, if they are known."""
        self._history.add(pieces, answered.tokens or ())


class Words:
    """Prompts are words, one for a token. Ideals are in the server's tokens if it has ``/tokenize``, else in words."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.note = "text prompts; ideals in the server's own tokens, by its /tokenize"
        self._endpoint = endpoint
        self._history = History()
        self._tokenizes = True

    def start(self, tokens: Sequence[int]) -> list[Any]:
        """Return a word for each token."""
        return [" " + word(token) for token in tokens]

    def answer(self, answered: Answered, max_tokens: int, seed: str) -> list[Any]:
        """Return the words of the answer's text."""
        return _PIECE.findall(answered.text)

    def send(self, pieces: list[Any]) -> list[int] | str:
        """Return the text."""
        return "".join(pieces)

    async def ideal(self, pieces: list[Any]) -> tuple[int, int]:
        """Return the tokens or words that were computed before, and all."""
        units = await self._units(pieces)
        shared = self._history.ideal(units)
        self._history.add(units)
        return shared, len(units)

    async def remember(self, pieces: list[Any], answered: Answered) -> None:
        """Remember the words of the answer."""
        known, longer = await self._units(pieces), await self._units([*pieces, *_PIECE.findall(answered.text)])
        self._history.add(known, longer[len(known) :])

    async def _units(self, pieces: list[Any]) -> list[Any]:
        if self._tokenizes:
            ids = await self._endpoint.tokenize("".join(pieces))
            if ids is not None:
                return ids
            self._tokenizes = False
            self.note = "text prompts; ideals estimated from words, since the server has no /tokenize"
        return pieces


def word(token: int) -> str:
    """Return the word that stands for a token id: another one for each of the first 2,197."""
    base = len(_SYLLABLES)
    return "".join(_SYLLABLES[token // base**place % base] for place in range(3))
