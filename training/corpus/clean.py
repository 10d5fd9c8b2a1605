"""Paragraphs of prose out of manuals: no code, no tables, no markup."""

from __future__ import annotations

import gzip
import html.parser
import re
from collections.abc import Iterable
from pathlib import Path

from training.corpus.fetch import Source

_SHORTEST = 60
"""Characters; shorter paragraphs are headings and scraps."""
_QUOTES = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": "...", "\u00a0": " "})


def documents(source: Source, folder: Path) -> list[list[str]]:
    """Return each file's (or entry's) paragraphs of prose, in the order of file names; without repeats.

    Parameters
    ----------
    source : Source
    folder : Path
        The unpacked package.
    """
    found: list[list[str]] = []
    seen: set[str] = set()
    paths = sorted({path for pattern in source.files for path in folder.glob(pattern) if path.is_file()})
    for path in paths:
        if any(path.match(pattern) for pattern in source.skip):
            continue
        for paragraphs in _READERS[source.format](_text(path)):
            kept = []
            for paragraph in map(_tidy, paragraphs):
                if is_prose(paragraph) and paragraph not in seen:
                    seen.add(paragraph)
                    kept.append(paragraph)
            if kept:
                found.append(kept)
    return found


def is_prose(paragraph: str) -> bool:
    """Whether a paragraph is made of sentences: mostly lower-case letters, ordinary words, and an end."""
    if len(paragraph) < _SHORTEST or not paragraph.isascii() or paragraph[-1] not in ".?!:":
        return False
    words = paragraph.split()
    plain = sum(re.fullmatch(r"[(\"']?[A-Za-z][a-z'-]*[.,;:?!)\"']*", word) is not None for word in words)
    longest = max(map(len, words))
    return plain / len(words) > 0.8 and longest < 30 and 3 < len(paragraph) / len(words) < 9


def sentences(paragraph: str) -> list[str]:
    """Split a paragraph after sentence ends."""
    return re.split(r"(?<=[.?!:]) +(?=[\"'(A-Z])", paragraph)


def _text(path: Path) -> str:
    raw = path.read_bytes()
    if path.suffix in (".gz", ".dz"):
        raw = gzip.decompress(raw)
    return raw.decode("utf-8", errors="replace")


def _tidy(paragraph: str) -> str:
    text = re.sub(r"\s+", " ", paragraph.translate(_QUOTES)).strip()
    return re.sub(r" ([.,;:?!)])", r"\1", text)


class _Paragraphs(html.parser.HTMLParser):
    """Collects the text of block elements, apart from code and scripts."""

    _BLOCKS = frozenset("p li dd dt td th h1 h2 h3 h4 div tr table ul ol dl br blockquote".split())
    _SILENT = frozenset("script style pre title svg".split())

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._parts: list[str] = []
        self._depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self._SILENT:
            self._depth += 1
        if tag in self._BLOCKS:
            self._close()

    def handle_endtag(self, tag: str) -> None:
        if tag in self._SILENT:
            self._depth = max(0, self._depth - 1)
        if tag in self._BLOCKS or tag in self._SILENT:
            self._close()

    def handle_data(self, data: str) -> None:
        if not self._depth:
            self._parts.append(data)

    def _close(self) -> None:
        if self._parts:
            self.found.append("".join(self._parts))
            self._parts = []


def _html(text: str) -> Iterable[list[str]]:
    parser = _Paragraphs()
    parser.feed(text)
    parser.close()
    return [parser.found]


def _blocks(text: str) -> list[str]:
    return re.split(r"\n\s*\n", text)


def _pod(text: str) -> Iterable[list[str]]:
    blocks = [block.strip("\n") for block in _blocks(text)]
    plain = [block for block in blocks if block and block[0] not in "= \t"]
    for _ in range(3):  # nested formatting codes, innermost first
        plain = [re.sub(r"\b[BCFISX]<([^<>]*)>", r"\1", block) for block in plain]
        plain = [re.sub(r"\bL<(?:([^<>|]*)\|)?([^<>]*)>", lambda m: m[1] or m[2], block) for block in plain]
    return [[block.replace("E<gt>", ">").replace("E<lt>", "<") for block in plain]]


def _rst(text: str) -> Iterable[list[str]]:
    blocks = [block for block in _blocks(text) if not block.lstrip().startswith("..")]
    blocks = [re.sub(r":[\w:-]+:`~?\.?([^`<]*?)(?: *<[^`]*)?`", r"\1", block) for block in blocks]
    return [[re.sub(r"`+_*|\*+|^\s*[*#-] ", "", block).replace("::", ":") for block in blocks]]


def _vim(text: str) -> Iterable[list[str]]:
    text = re.sub(r"(?m)^[^\n]*\*[\w:'<>-]+\*[^\n]*$", "", text)  # lines with link targets
    return [[re.sub(r"\|([^|\s]+)\||`([^`\s]+)`", r"\1\2", block).lstrip("<") for block in _blocks(text)]]


def _dict(text: str) -> Iterable[list[str]]:
    """Dictionary entries; a hundred make a document, so that documents are long enough to be split between uses."""
    blocks = [re.sub(r"[{}]", "", block) for block in _blocks(text)]
    return [blocks[first : first + 100] for first in range(0, len(blocks), 100)]


_READERS = {"html": _html, "pod": _pod, "rst": _rst, "vim": _vim, "dict": _dict}
