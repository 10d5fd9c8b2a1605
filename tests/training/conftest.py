"""A data folder of a few made-up documents, and a model of a few thousand parameters."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest
import torch
from training.corpus.prepare import READY
from training.corpus.tokens import train_tokenizer
from training.kernels.build import missing_tools
from training.model import Hybrid, library_model
from training.settings import Settings, Stage, load_settings
from training.tasks.everyday import LEXICON, sentence

VOCABULARY = 640


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    if missing_tools():
        pytest.skip("no C++ compiler")
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder like that of `tailreplay-train data`."""
    folder = tmp_path_factory.mktemp("data")
    draw = random.Random(0)
    documents = []
    for _ in range(24):
        paragraphs = [" ".join(sentence(draw) for _ in range(draw.randint(3, 6))) for _ in range(8)]
        documents.append("\n".join(paragraphs))
    for split in ("train", "valid"):
        (folder / f"{split}.txt").write_text("\n\n".join(documents), encoding="utf-8")
    words = {"train": sorted(LEXICON[::2]), "valid": sorted(LEXICON[1::2])}
    (folder / "words.json").write_text(json.dumps(words), encoding="utf-8")
    wording = ["Question: What is the special magic number for it?\nAnswer: Set to. Add one. Take one.\nCount: "] * 50
    train_tokenizer([*documents, *wording], VOCABULARY).save(str(folder / "tokenizer.json"))
    (folder / READY).write_text(json.dumps({"vocabulary": VOCABULARY, "sha256": "0" * 64}), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tiny() -> Settings:
    """The settings of the real run, with a model and steps of a few milliseconds."""
    settings = load_settings(tokens=20_000, ranks=1)
    model = dataclasses.replace(
        settings.model,
        layers="LLFLF",
        hidden=32,
        feed_forward=48,
        vocabulary=VOCABULARY,
        query_heads=2,
        kv_heads=1,
        head_dim=32,
        delta_dim=16,
    )
    tasks = {"keys": 0.5, "text": 0.25, "count": 0.25}
    stages = (
        Stage("first", 0.5, 256, {128: 0.5, 64: 0.5}, tasks),
        Stage("second", 1.0, 512, {256: 1.0}, tasks),
    )
    run = dataclasses.replace(settings.run, log_every=4)
    return dataclasses.replace(settings, run=run, model=model, stages=stages)


@pytest.fixture
def model(tiny: Settings) -> Hybrid:
    """A tiny model, with the real run's initial weights."""
    from training.initial import initialise

    library = library_model(tiny.model)
    initialise(library, tiny.model, 3)
    return Hybrid(library.eval())
