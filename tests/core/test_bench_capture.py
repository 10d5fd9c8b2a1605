"""`tailreplay bench capture`: pairs, order, and what the cost is."""

from __future__ import annotations

import argparse

import pytest

from tailreplay.bench import capture
from tailreplay.bench.capture_vllm import timed_call
from tailreplay.cli import main


def test_pairs_take_turns_with_equal_prompts_and_no_prompt_comes_again() -> None:
    calls: list[tuple[bool, list[list[int]], int]] = []

    def timed(prompts: list[list[int]], generate: int, capturing: bool) -> float:
        calls.append((capturing, prompts, generate))
        # The first pair is a warm-up: were it counted, the cost would be another.
        return 50.0 if len(calls) <= 2 else 1.02 if capturing else 1.0

    arguments = argparse.Namespace(engine="vllm", concurrency=3, prompt=100, generate=16, pairs=3)
    prefill, decode = capture.measure(timed, arguments)
    assert prefill["cost"] == pytest.approx(0.02)
    assert (prefill["requests"], prefill["tokens"], decode["requests"], decode["tokens"]) == (1, 101, 3, 48)
    assert (prefill["pairs"], prefill["plain_ms"]) == (3, 1000)
    pairs = list(zip(calls[::2], calls[1::2], strict=True))
    assert len(pairs) == 8
    assert [first[0] for first, _ in pairs] == [True, False] * 4
    assert all(first[1:] == second[1:] and first[0] != second[0] for first, second in pairs)
    prompts = [tuple(ids) for first, _ in pairs for ids in first[1]]
    assert len(set(prompts)) == len(prompts)


@pytest.mark.parametrize("capturing", [True, False])
def test_a_call_on_vllm_ends_with_the_step_that_stores_the_last_page(capturing: bool) -> None:
    class FakeLLM:
        def generate(self, prompts: list[dict[str, list[int]]], params: tuple[int, bool], use_tqdm: bool) -> None:
            calls.append(([each["prompt_token_ids"] for each in prompts], params))

    calls: list[object] = []
    timed_call(FakeLLM(), calls.append, lambda tokens, store: (tokens, store), [[1], [2]], 9, capturing)
    assert calls == [capturing, ([[1], [2]], (9, capturing)), ([[5, 6, 7]], (1, False))]


@pytest.mark.parametrize("option", ["--prompt", "--generate", "--concurrency", "--pairs"])
def test_numbers_that_mean_nothing_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "capture", option, "0"]) == 2
    assert f"{option} must be at least 1, got 0." in capsys.readouterr().err
