"""Text and words that tasks are written with."""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

from tailreplay.errors import InvalidRequestError

_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(])")
_WORD = re.compile(r"\b[a-z]{5,9}\b")
_COMMONEST, _RAREST = 60, 900
FEWEST_CHARACTERS = 20_000


class Material:
    """Prose, its sentences and its words.

    Parameters
    ----------
    paragraphs : list of str
        Each on one line.
    name : str
        Where they come from, for reports.

    Raises
    ------
    InvalidRequestError
        If there is too little text.
    """

    def __init__(self, paragraphs: list[str], name: str) -> None:
        self.name = name
        self.paragraphs = paragraphs
        joined = "\n".join(paragraphs)
        self.characters = len(joined)
        if len(joined) < FEWEST_CHARACTERS:
            raise InvalidRequestError(
                f"{name} has {len(joined)} characters of prose; the evaluation needs {FEWEST_CHARACTERS} or more."
            )
        self.digest = hashlib.sha256(joined.encode()).hexdigest()[:16]
        self.sentences = [s for paragraph in paragraphs for s in _SENTENCE.split(paragraph) if 20 <= len(s) <= 300]
        counts = Counter(_WORD.findall(joined))
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        # The commonest are little words with many meanings, bad as names.
        self.words = sorted(ranked[_COMMONEST:_RAREST])
        if len(self.words) < 300 or len(self.sentences) < 100:
            raise InvalidRequestError(f"{name} is no English prose: too few different words or sentences.")

    def passage(self, rng: random.Random) -> Iterator[str]:
        """Yield paragraphs from a random one on, round and round."""
        first = rng.randrange(len(self.paragraphs))
        return cycle(self.paragraphs[first:] + self.paragraphs[:first])

    def filler(self, rng: random.Random) -> Iterator[str]:
        """Yield sentences from a random one on, round and round."""
        first = rng.randrange(len(self.sentences))
        return cycle(self.sentences[first:] + self.sentences[:first])


def python_topics() -> Material:
    """Return the prose of Python's own language reference, which comes with every full Python.

    Raises
    ------
    InvalidRequestError
        If this Python was built without it.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise InvalidRequestError("This Python lacks its help topics: give prose of your own with --text.") from error
    # In the order of names: the order of the file differs between versions.
    return Material(_prose("\n\n".join(topics[name] for name in sorted(topics))), "Python's help topics")


def text_file(path: Path) -> Material:
    """Return a text file's prose: paragraphs are separated by empty lines.

    Raises
    ------
    InvalidRequestError
        If it cannot be read, or has too little text.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"The text '{path}' cannot be read: {error}.") from error
    return Material(_prose(text), f"'{path}'")


def _prose(text: str) -> list[str]:
    """Paragraphs of running text, each once and on one line; headings, lists and code are left out."""
    found: dict[str, None] = {}
    for block in re.split(r"\n\s*\n", text):
        line = " ".join(block.split())
        letters = sum(character.isalpha() or character == " " for character in line)
        if len(line) >= 60 and line[0].isupper() and line[-1] in ".!?" and letters > 0.85 * len(line):
            found[line] = None
    return list(found)
