"""Makes the data folder: text of both splits, the words that tasks use, and the tokenizer."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from training.corpus.clean import documents
from training.corpus.fetch import fetch, load_sources
from training.corpus.tokens import train_tokenizer
from training.tasks.base import Draw, Material, Script
from training.tasks.everyday import LEXICON
from training.tasks.people import CLOSED
from training.tasks.registry import TASKS

_HELD_OUT = 20
"""One document in so many is for evaluation only."""
_WORDS, _HELD_OUT_WORDS = 3600, 360
_LONGEST = 3
"""Tokens of a word that may be a name or key."""
READY = "manifest.json"


def prepare(folder: Path, vocabulary: int, accept_changed: bool = False) -> dict[str, Any]:
    """Fetch, clean, split and tokenise, unless that was done before.

    Parameters
    ----------
    folder : Path
        Receives ``train.txt`` and ``valid.txt`` (a paragraph a line, an empty line between documents),
        ``words.json``, ``tokenizer.json`` and ``manifest.json``.
    vocabulary : int
        Entries of the tokenizer.
    accept_changed : bool
        See `training.corpus.fetch.fetch`.

    Returns
    -------
    dict
        The manifest: what was used, and a digest of the results.
    """
    ready = folder / READY
    if ready.exists():
        manifest: dict[str, Any] = json.loads(ready.read_text(encoding="utf-8"))
        if manifest["vocabulary"] == vocabulary:
            return manifest
    folder.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[list[str]]] = {"train": [], "valid": []}
    used = []
    for source in load_sources():
        contents, digest = fetch(source, folder, accept_changed)
        found = documents(source, contents)
        for document in found:
            parts["valid" if _is_held_out(document[0]) else "train"].append(document)
        size = sum(len(paragraph) for document in found for paragraph in document)
        entry = {"name": source.name, "sha256": digest, "licence": source.licence, "characters": size}
        used.append(entry)
        print(f"{source.name}: {size / 1e6:.2f} M characters of prose in {len(found)} documents")
    for split, kept in parts.items():
        text = "\n\n".join("\n".join(document) for document in kept)
        (folder / f"{split}.txt").write_text(text, encoding="utf-8")
    words = _words(parts["train"])
    (folder / "words.json").write_text(json.dumps(words), encoding="utf-8")
    tokenizer = train_tokenizer(_lines(parts["train"], Material(folder, "train")), vocabulary)
    tokenizer.save(str(folder / "tokenizer.json"))
    short = {
        split: [w for w in kept if len(tokenizer.encode(f" {w}").ids) <= _LONGEST] for split, kept in words.items()
    }
    (folder / "words.json").write_text(json.dumps(short), encoding="utf-8")
    files = ("train.txt", "valid.txt", "words.json", "tokenizer.json")
    together = hashlib.sha256(b"".join((folder / name).read_bytes() for name in files)).hexdigest()
    manifest = {"vocabulary": vocabulary, "sources": used, "sha256": together}
    ready.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    return manifest


def _is_held_out(first: str) -> bool:
    return int(hashlib.sha256(first.encode()).hexdigest(), 16) % _HELD_OUT == 0


def _lines(parts: list[list[str]], material: Material) -> Iterator[str]:
    """Text that the tokenizer's entries are chosen from: a part of the corpus, and the tasks' own wording and words."""
    for document in parts[::3]:
        yield from document
    for name, task in TASKS.items():
        for index in range(150):
            script = Script()
            task(script, Draw(random.Random(f"tokenizer/{name}/{index}"), material), 2000)
            yield script.text
    yield from (f" {word}\n{word}" for word in (*LEXICON, *CLOSED) for _ in range(150))


def _words(parts: list[list[str]]) -> dict[str, list[str]]:
    """Common lower-case words, for names and keys; some are kept for evaluation."""
    counts: Counter[str] = Counter()
    for document in parts:
        for paragraph in document:
            counts.update(re.findall(r"(?<= )[a-z]{3,9}(?=[ .,])", paragraph))
    common = sorted((word for word, count in counts.items() if count >= 20), key=lambda word: (-counts[word], word))
    # The most common are function words, which the text is full of: bad names.
    chosen = [*dict.fromkeys([*LEXICON, *common[150 : 150 + _WORDS]])]
    held_out = chosen[7 :: len(chosen) // _HELD_OUT_WORDS][:_HELD_OUT_WORDS]
    return {"train": sorted(set(chosen) - set(held_out)), "valid": sorted(held_out)}
