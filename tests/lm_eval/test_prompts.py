"""Cutting token ids: they are those of the whole text."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from tailreplay.evals.lm_eval.prompts import Prompt, PromptCutter
from tailreplay.loading import BUNDLED

TEXT = "The sea was calm that day, and nobody went out. Question: who went out? Answer:"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The bundled tokenizer, which joins letters into words."""
    return AutoTokenizer.from_pretrained(str(BUNDLED))


class Slow:
    """A tokenizer without offsets, as Python tokenizers are."""

    is_fast = False
    bos_token = None

    def __init__(self, tokenizer: Any) -> None:
        self.encode = tokenizer.encode


class Beginning(Slow):
    """A tokenizer that puts a token before every text."""

    bos_token = "<s>"

    def __init__(self) -> None:
        self.encode = lambda text, add_special_tokens: [1] * add_special_tokens + [2] * len(text.split())


@pytest.mark.parametrize("offset", range(len(TEXT) + 1))
def test_the_ids_are_those_of_the_whole_text_and_the_context_ends_before_the_offset(
    tokenizer: Any, offset: int
) -> None:
    prompt = PromptCutter(tokenizer, 4).cut(TEXT, offset)
    assert prompt.ids == tokenizer.encode(TEXT)
    assert 0 <= prompt.cached < len(prompt.ids)
    context = tokenizer.decode(prompt.ids[: prompt.cached])
    assert TEXT.startswith(context)
    assert len(context) <= offset
    if prompt.cached < len(prompt.ids) - 1:
        assert len(tokenizer.decode(prompt.ids[: prompt.cached + 1])) > offset


def test_without_an_offset_the_last_tokens_are_the_query(tokenizer: Any) -> None:
    ids = tokenizer.encode(TEXT)
    assert PromptCutter(tokenizer, 4).cut(TEXT, None) == Prompt(ids, len(ids) - 4)
    assert PromptCutter(tokenizer, 10_000).cut(TEXT, None).cached == 0


def test_tokenizers_without_offsets_cut_at_the_same_place(tokenizer: Any) -> None:
    offset = TEXT.index(" Question")
    assert PromptCutter(Slow(tokenizer), 4).cut(TEXT, offset) == PromptCutter(tokenizer, 4).cut(TEXT, offset)
    ids = tokenizer.encode(TEXT)
    for offset in range(len(TEXT) + 1):
        cut = PromptCutter(Slow(tokenizer), 4).cut(TEXT, offset)
        assert cut.ids == ids
        assert 0 <= cut.cached < len(ids)


def test_the_token_that_begins_a_text_comes_once() -> None:
    cutter = PromptCutter(Beginning(), 4)
    assert cutter.encode("a b") == [1, 2, 2]
    assert cutter.encode("<s> a b") == [2, 2, 2]
    assert cutter.encode("a b", add_special_tokens=False) == [2, 2]


def test_what_does_not_fit_is_dropped_from_the_left() -> None:
    prompt = Prompt(list(range(10)), 6)
    assert prompt.last(20) == prompt
    assert prompt.last(8) == Prompt(list(range(2, 10)), 4)
    assert prompt.last(3) == Prompt([7, 8, 9], 0)
