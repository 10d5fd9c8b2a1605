"""Batches: functions of seed, step and rank, with answers marked to the token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from training.evaluate import ASKED, NOTHING, Examiner, Loss
from training.model import Hybrid
from training.settings import Settings
from training.stream import NAMES, Stream, encode
from training.tasks.base import Kind, Script


def test_a_batch_depends_on_seed_step_and_rank_alone(data: Path, tiny: Settings) -> None:
    stage = tiny.stages[0]
    first, again = Stream(data, 5), Stream(data, 5)
    again.batch(stage, 0)
    for step in (3, 4):
        ours, theirs = first.batch(stage, step), again.batch(stage, step)
        assert torch.equal(ours.ids, theirs.ids)
        assert torch.equal(ours.kinds, theirs.kinds)
    here, there = Stream(data, 5, 0, 2).batch(stage, 3), Stream(data, 5, 1, 2).batch(stage, 3)
    assert here.ids.shape == there.ids.shape
    assert not torch.equal(here.ids, there.ids)
    assert not torch.equal(first.batch(stage, 3).ids, Stream(data, 6).batch(stage, 3).ids)


def test_targets_are_the_next_tokens(data: Path, tiny: Settings) -> None:
    for step in range(6):
        batch = Stream(data, 1).batch(tiny.stages[0], step)
        assert batch.ids.numel() == tiny.stages[0].tokens_per_step
        assert torch.equal(batch.ids[:, 1:], batch.targets[:, :-1])
        assert {NAMES[int(task)] for task in batch.tasks} <= set(tiny.stages[0].tasks)
        assert (batch.kinds != Kind.SILENT).any(1).all()


def test_marked_tokens_spell_the_answer(data: Path) -> None:
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    script = Script()
    script.add("The old mill is small. ", Kind.TEXT)
    script.add("apple: 4821;")
    script.ask("Get apple: ", "4821")
    script.ask("Question: How old is Anna?\nAnswer: ", "Paris")
    script.ask("Check door:", " red")
    encoded = encode(tokenizer, script)
    marked = [token for token, kind in zip(encoded.ids, encoded.kinds, strict=True) if kind == Kind.ANSWER]
    assert tokenizer.decode(marked) == "4821\nParis\n red\n"
    for question, answer in zip(script.questions, ("4821\n", "Paris\n", " red\n"), strict=True):
        start, at, end = encoded.span(question)
        assert tokenizer.decode(encoded.ids[at:end]) == answer
        assert tokenizer.decode(encoded.ids[start:at]) == script.text[question.start : question.answer]


@pytest.mark.parametrize("task", ASKED)
def test_an_examination_is_no_longer_than_asked_and_nearly_as_long(data: Path, task: str) -> None:
    lengths = [len(Examiner(data).question(task, 700, index).ids) for index in range(6)]
    assert max(lengths) <= 700
    assert max(lengths) > 500


def test_an_untrained_model_answers_nothing_right(data: Path, model: Hybrid) -> None:
    examiner = Examiner(data)
    for loss in (NOTHING, Loss("zero", states=True, inside=True), Loss("kv", kv=True)):
        assert examiner.exact(model, "needle", 300, 4, loss) == 0
    first, whole = examiner.text(model, 300, 2)
    assert 3 < first < 10
    assert 3 < whole < 10
