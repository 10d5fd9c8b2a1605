"""The harness' model: what is computed, reused and answered."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lm_eval.api.registry
import pytest
import torch
from transformers import Qwen3Config

from tailreplay import HybridLM, InvalidRequestError, PrefixCache, TailReplayError, UnsupportedModelError
from tailreplay.evals.lm_eval import TailReplayLM
from tailreplay.loading import BUNDLED
from tests.engine.tiny_models import tiny_model
from tests.lm_eval.conftest import Plain, generation, request

DOCUMENTS = [
    "The sea was calm that day. " * 12 + "The special magic number for apple is 48213. " + "Nobody went out. " * 12,
    "She reads a book by the window. " * 15 + "The special magic number for river is 51662. " + "It rains. " * 8,
]
QUESTIONS = [
    f"What is the special magic number for {name} mentioned in the text?" for name in ("apple", "river", "sea")
]
NEEDLE = "niah_single_1"


def prompts() -> list[str]:
    """Return every question about every document, the documents taking turns."""
    return [f"{document}\n{question} It is" for question in QUESTIONS for document in DOCUMENTS]


def split(lm: HybridLM, prompt: str) -> tuple[int, int]:
    """Return the tokens of a prompt's context and of its query."""
    whole = len(lm.tokenizer.encode(prompt))
    context = len(lm.tokenizer.encode(prompt[: prompt.rindex("What is")]))
    return context, whole - context


def test_the_harness_finds_the_model_beside_its_own() -> None:
    assert lm_eval.api.registry.get_model("tailreplay") is TailReplayLM
    assert lm_eval.api.registry.get_model("hf") is not None


def test_arguments_come_as_the_harness_gives_them() -> None:
    more = {"batch_size": 1, "max_batch_size": None, "device": "cpu"}
    lm = TailReplayLM.create_from_arg_string("pretrained=bundled,method=replay,ratio=0.5,max_length=2048", more)
    assert lm.get_model_info()["ratio"] == 0.5
    assert lm.get_model_info()["method"] == "replay"
    assert lm.max_length == 2048
    assert lm.eot_token_id == lm.prefix_token_id == lm.tokenizer.eos_token_id
    # Room for one context of that length, and no more than a page of it.
    cache = lm._runner.lm.cache
    assert cache.host_bytes == 2048 // 64 * cache._arena.layout.page_bytes  # type: ignore[union-attr]


def test_full_prefill_answers_like_the_library(hybrid: HybridLM, plain: Plain) -> None:
    lm = TailReplayLM(hybrid, method="full")
    answers = lm.generate_until([generation(prompt, 12, task=NEEDLE) for prompt in prompts()])
    assert answers == [plain(hybrid.tokenizer.encode(prompt), 12) for prompt in prompts()]
    assert len(set(answers)) > 1
    assert lm.tallies[NEEDLE].reused == lm.tallies[NEEDLE].contexts == 0


@pytest.mark.parametrize(("method", "ratio"), [("exact", None), ("replay", 1.0)])
def test_whole_states_answer_like_full_prefill(
    hybrid: HybridLM, plain: Plain, method: str, ratio: float | None
) -> None:
    lm = TailReplayLM(hybrid, method=method, ratio=ratio)
    answers = lm.generate_until([generation(prompt, 12, task=NEEDLE) for prompt in prompts()])
    assert answers == [plain(hybrid.tokenizer.encode(prompt), 12) for prompt in prompts()]
    assert lm.tallies[NEEDLE].reused > 0


@pytest.mark.parametrize(("method", "ratio", "replayed"), [("zero", None, 0.0), ("replay", 0.05, 0.05)])
def test_each_context_is_computed_once_and_only_queries_after_it(
    hybrid: HybridLM, computed: list[int], method: str, ratio: float | None, replayed: float
) -> None:
    lm = TailReplayLM(hybrid, method=method, ratio=ratio)
    lm.generate_until([generation(prompt, 1, task=NEEDLE) for prompt in prompts()])
    sizes = [split(hybrid, prompt) for prompt in prompts()]
    contexts = [context for context, _ in sizes[:2]]
    # First document, its three queries, second document, its three: the requests came in turns.
    queries = [query for _, query in sizes]
    assert computed == [contexts[0], *queries[::2], contexts[1], *queries[1::2]]
    tally = lm.tallies[NEEDLE]
    assert (tally.requests, tally.contexts) == (6, 2)
    assert tally.prompt_tokens == sum(map(sum, sizes))
    assert tally.reused == 3 * sum(contexts)
    assert tally.replayed == pytest.approx(replayed * tally.reused, abs=6)
    assert tally.reused_share > 0.8


def test_no_question_leaves_anything_behind(hybrid: HybridLM) -> None:
    lm = TailReplayLM(hybrid, method="replay", ratio=0.05)
    asked = [generation(prompt, 8, task=NEEDLE) for prompt in prompts()[::2]]
    alone = [TailReplayLM(hybrid, ratio=0.05).generate_until([one])[0] for one in asked]
    lm.generate_until(asked[:1])
    pages = hybrid.cache.stats().pages
    assert lm.generate_until(asked[1:]) == alone[1:]
    assert lm.generate_until(asked) == alone
    assert hybrid.cache.stats().pages == pages
    assert hybrid.cache.stats().pinned == 0
    assert lm.tallies[NEEDLE].contexts == 1


def test_answers_end_where_the_task_says(hybrid: HybridLM, plain: Plain) -> None:
    (prompt, *_) = prompts()
    whole = plain(hybrid.tokenizer.encode(prompt), 12)
    stop = whole[4:6]
    lm = TailReplayLM(hybrid, method="exact", max_gen_toks=12)
    assert lm.generate_until([generation(prompt, 12, until=[stop, ""], task=NEEDLE)]) == [whole[: whole.index(stop)]]
    assert lm.generate_until([request("generate_until", prompt, {}, task=NEEDLE)]) == [whole]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_sample": True, "temperature": 0.7}, "'some_task' wants sampled answers"),
        ({"temperature": 0.7}, "wants sampled answers"),
        ({"max_gen_toks": 512}, "answers of 512 tokens, but prompt and answer have 512 tokens together"),
        ({"max_gen_toks": 0}, "answers of 0 tokens"),
    ],
)
def test_what_cannot_be_answered_is_refused_before_anything_runs(
    hybrid: HybridLM, computed: list[int], settings: dict[str, Any], message: str
) -> None:
    lm = TailReplayLM(hybrid, max_length=512)
    with pytest.raises(InvalidRequestError, match=message):
        lm.generate_until([generation("abc"), request("generate_until", "abc", settings)])
    assert computed == []


def test_long_prompts_lose_their_beginning_with_one_warning(
    hybrid: HybridLM, plain: Plain, caplog: pytest.LogCaptureFixture
) -> None:
    ids = [hybrid.tokenizer.encode(prompt) for prompt in prompts()]
    room = min(map(len, ids)) - 20
    lm = TailReplayLM(hybrid, method="exact", max_length=room + 8)
    with caplog.at_level(logging.WARNING, "tailreplay"):
        answers = lm.generate_until([generation(prompt, 8, task=NEEDLE) for prompt in prompts()])
    assert answers == [plain(each[-room:], 8) for each in ids]
    assert lm.tallies[NEEDLE].prompt_tokens == 6 * room
    (warning,) = caplog.messages
    assert f"longer than the {room} that there is room for" in warning


# ---- log-probabilities


def library(lm: HybridLM, ids: list[int], first: int) -> float:
    """Return the library's log-probability of ``ids[first:]``."""
    with torch.inference_mode():
        logits = lm.model(torch.tensor([ids[:-1]])).logits[0, first - 1 :].float()
    return float(logits.log_softmax(-1).gather(-1, torch.tensor(ids[first:])[:, None]).sum())


@pytest.mark.parametrize(("method", "ratio"), [("full", None), ("exact", None), ("replay", 1.0)])
def test_continuations_are_scored_like_the_librarys(hybrid: HybridLM, method: str, ratio: float | None) -> None:
    lm = TailReplayLM(hybrid, method=method, ratio=ratio)
    choices = [" 48213", " nobody", " the sea was calm"]
    pairs = [(DOCUMENTS[0] + " ", choice) for choice in choices] + [("", "The sea"), (" ", "was calm")]
    got = lm.loglikelihood([request("loglikelihood", *pair) for pair in pairs])
    encode = hybrid.tokenizer.encode
    context = encode(DOCUMENTS[0].rstrip())
    for (_, choice), (logprob, _) in zip(pairs[:3], got, strict=False):
        ids = encode(DOCUMENTS[0].rstrip() + DOCUMENTS[0][len(DOCUMENTS[0].rstrip()) :] + " " + choice)
        assert logprob == pytest.approx(library(hybrid, ids, len(context)), rel=1e-3)
    for text, (logprob, _) in zip(["The sea", " was calm"], got[3:], strict=True):
        ids = [lm.eot_token_id, *encode(text)]
        assert logprob == pytest.approx(library(hybrid, ids, 1), rel=1e-3)
    tally = lm.tallies["some_task"]
    assert tally.contexts == (0 if method == "full" else 1)
    assert tally.reused == (0 if method == "full" else 3 * (len(context) - 64))


def test_continuations_given_as_tokens_are_scored_too(hybrid: HybridLM) -> None:
    lm = TailReplayLM(hybrid, method="exact", query_tokens=10)
    ids = hybrid.tokenizer.encode(DOCUMENTS[1])
    (got,) = lm._loglikelihood_tokens([(("", ""), ids[:-3], ids[-3:])])
    assert got[0] == pytest.approx(library(hybrid, ids, len(ids) - 3), rel=1e-3)
    assert lm.tallies[""].reused == len(ids) - 13


def test_contexts_of_continuations_lose_their_beginning(hybrid: HybridLM) -> None:
    lm = TailReplayLM(hybrid, method="exact", max_length=100)
    ids = hybrid.tokenizer.encode(DOCUMENTS[1])
    (got,) = lm._loglikelihood_tokens([(("", ""), ids[:-3], ids[-3:])])
    assert got[0] == pytest.approx(library(hybrid, ids[-101:], 98), rel=1e-3)
    with pytest.raises(InvalidRequestError, match="continuation of 101 tokens"):
        lm._loglikelihood_tokens([(("", ""), ids[:5], ids[:101])])


@pytest.mark.parametrize(("method", "ratio"), [("full", None), ("replay", 1.0)])
def test_texts_are_scored_in_windows(hybrid: HybridLM, method: str, ratio: float | None) -> None:
    lm = TailReplayLM(hybrid, method=method, ratio=ratio, max_length=100)
    ids = hybrid.tokenizer.encode(DOCUMENTS[0])[:150]
    text = hybrid.tokenizer.decode(ids)
    assert hybrid.tokenizer.encode(text) == ids
    (got,) = lm.loglikelihood_rolling([request("loglikelihood_rolling", text)])
    # A window of 100 tokens after the token that begins a text, and one that ends with the last token and scores 50.
    expected = library(hybrid, [lm.prefix_token_id, *ids[:100]], 1) + library(hybrid, ids[49:], 51)
    assert got == pytest.approx(expected, rel=1e-3)
    assert lm.tallies["some_task"].reused == (0 if method == "full" else 100)


# ---- chats, and models that are refused


def test_chats_are_rendered_with_the_models_template(hybrid: HybridLM) -> None:
    lm = TailReplayLM(hybrid)
    chat = [{"role": "user", "content": "Where?"}]
    text = lm.apply_chat_template(chat)
    assert text == hybrid.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    begun = lm.apply_chat_template([*chat, {"role": "assistant", "content": "It is"}], add_generation_prompt=False)
    assert begun.endswith("It is")
    assert "/" not in lm.tokenizer_name


def test_a_model_without_a_chat_template_says_so(hybrid: HybridLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid.tokenizer, "chat_template", None)
    with pytest.raises(InvalidRequestError, match="no chat template"):
        TailReplayLM(hybrid).apply_chat_template([])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "fast"}, "must be one of"),
        ({"method": "exact", "ratio": 0.1}, "goes with method 'replay' only"),
        ({"ratio": 2}, r"\(0, 1\]"),
        ({"query_tokens": 0}, "at least 1"),
        ({"max_length": 1}, "at least 2"),
        ({"max_length": 1 << 20}, "above the model's limit"),
        ({"dtype": "int99"}, "not a dtype"),
        ({"host_bytes": "much"}, "not a size"),
        ({"pretrained": "/no/such/folder"}, "no model folder"),
    ],
)
def test_bad_arguments_are_refused_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(HybridLM, "from_pretrained", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(TailReplayError, match=message):
        TailReplayLM(**arguments)


def test_models_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    Qwen3Config(num_hidden_layers=2, hidden_size=32, intermediate_size=32, vocab_size=50).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="no linear layers"):
        TailReplayLM(str(tmp_path))
    with pytest.raises(UnsupportedModelError, match="no tokenizer"):
        TailReplayLM(HybridLM(tiny_model("qwen3_5"), cache=PrefixCache("32MiB")))


def test_a_cache_that_cannot_hold_a_context_is_an_error_and_not_a_lower_share() -> None:
    lm = TailReplayLM(str(BUNDLED), host_bytes="200KiB")
    with pytest.raises(TailReplayError, match=r"Only \d+ of a context's \d+ tokens could be reused"):
        lm.generate_until([generation(prompts()[0], 1, task=NEEDLE)])
