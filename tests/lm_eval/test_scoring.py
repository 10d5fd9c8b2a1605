"""Log-probabilities against the library's."""

from __future__ import annotations

import pytest
import torch

from tailreplay import HybridLM, PrefixCache
from tailreplay.evals.lm_eval import scoring
from tailreplay.evals.lm_eval.methods import parse_method
from tailreplay.evals.lm_eval.prompts import Prompt
from tailreplay.evals.lm_eval.runner import Runner
from tests.engine.tiny_models import random_ids, tiny_model

IDS = random_ids(150, seed=3)


@pytest.fixture(scope="module")
def lm() -> HybridLM:
    """A tiny model that computes 32 tokens at once."""
    return HybridLM(tiny_model("qwen3_5"), cache=PrefixCache("32MiB"), prefill_chunk=32)


def library(lm: HybridLM, ids: list[int], first: int) -> tuple[float, bool]:
    """Score ``ids[first:]`` in one pass of the library."""
    with torch.inference_mode():
        logits = lm.model(torch.tensor([ids[:-1]])).logits[0, first - 1 :].float()
    wanted = torch.tensor(ids[first:])
    scores = logits.log_softmax(-1).gather(-1, wanted[:, None])
    return float(scores.sum()), bool((logits.argmax(-1) == wanted).all())


@pytest.mark.parametrize(("first", "most"), [(1, 5), (1, 512), (2, 512), (32, 512), (33, 5), (100, 512), (149, 5)])
@pytest.mark.parametrize(("method", "ratio"), [("full", None), ("exact", None), ("replay", 1.0)])
def test_scores_are_the_librarys(
    lm: HybridLM, monkeypatch: pytest.MonkeyPatch, method: str, ratio: float | None, first: int, most: int
) -> None:
    monkeypatch.setattr(scoring, "_MOST_LOGITS", most)
    runner = Runner(lm, parse_method(method, ratio))
    expected, _ = library(lm, IDS, first)
    got, report = runner.score(Prompt(IDS[:first], first // 2), IDS[first:])
    assert got.logprob == pytest.approx(expected, rel=1e-4)
    assert report.matched == (0 if method == "full" else first // 2)
    window, report = runner.score_window(IDS, first)
    assert window.logprob == pytest.approx(expected, rel=1e-4)
    assert report.matched == (0 if method == "full" else 74)


def test_a_continuation_is_greedy_only_if_every_token_is(lm: HybridLM) -> None:
    runner = Runner(lm, parse_method("exact"))
    answer = lm.generate(IDS, max_new_tokens=4, replay="off", store=False, stop=[]).tokens
    prompt = Prompt(IDS, 100)
    assert runner.score(prompt, answer)[0].greedy
    assert not runner.score(prompt, [answer[0] + 1, *answer[1:]])[0].greedy
    assert not runner.score(prompt, [*answer[:-1], (answer[-1] + 1) % 97])[0].greedy


@pytest.mark.parametrize("tokens", [2, 3, 4, 5])
def test_short_windows_are_scored(lm: HybridLM, tokens: int) -> None:
    ids = IDS[:tokens]
    got, _ = Runner(lm, parse_method("exact")).score_window(ids, 1)
    assert got.logprob == pytest.approx(library(lm, ids, 1)[0], rel=1e-4)


def test_replay_and_zero_change_scores_after_the_context_only(lm: HybridLM) -> None:
    """Of a window the first half is scored while it is computed, exactly."""
    expected = library(lm, IDS[:75], 1)[0]
    for method in ("zero", "replay"):
        runner = Runner(lm, parse_method(method))
        whole, rest = runner.score_window(IDS, 1)[0], runner.score(Prompt(IDS[:75], 74), IDS[75:])[0]
        assert whole.logprob - rest.logprob == pytest.approx(expected, rel=1e-4)
        assert abs(whole.logprob - library(lm, IDS, 1)[0]) > 0.01
