"""The engine killed in the middle of loads, at random moments, and started again."""

from __future__ import annotations

import concurrent.futures
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from tests.server.texts import KEYS, document, question
from tests.vllm_live.conftest import BUNDLED, Server
from tests.vllm_live.test_server import Caller

KILLS = int(os.environ.get("TAILREPLAY_KILLS", "3"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kill", range(KILLS))
def test_a_killed_engine_serves_on_after_a_restart(kill: int, tmp_path: Path) -> None:
    draw = random.Random(kill)
    tokenizer: Any = AutoTokenizer.from_pretrained(BUNDLED)
    text, numbers = document(kill, 100)
    prompts = [(tokenizer.encode(f"{text}\n{question(key)}\nAnswer: "), numbers[key]) for key in KEYS]
    # A tail of few tokens a step, so that loads take many steps and the kill falls into them.
    settings = {"host_bytes": "64MiB", "min_match": 16, "max_replay_tokens_per_step": 16}
    first = Server(tmp_path / "first", settings)
    caller = Caller(first, "killed")
    caller.send(prompts[0][0])

    def ask(job: tuple[list[int], str]) -> bool:
        try:
            caller.send(job[0], mode="exact")
        except openai.OpenAIError:
            return False
        return True

    timer = threading.Timer(draw.uniform(0.02, 0.5), os.killpg, (first.process.pid, signal.SIGKILL))
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        timer.start()
        outcomes = list(pool.map(ask, prompts * 5))
    timer.join()
    first.process.wait(30)
    assert not all(outcomes), "the kill came in the middle"
    second = Server(tmp_path / "second", {**settings, "max_replay_tokens_per_step": 2048})
    try:
        again = Caller(second, "killed")
        answers = [again.send(ids, max_tokens=6) for ids, _ in prompts]
        right = sum(answer.text.startswith(number) for answer, (_, number) in zip(answers, prompts, strict=True))
        assert right >= len(prompts) - 1
        assert answers[0].cached == 0
        assert all(answer.cached > 500 for answer in answers[1:])
    finally:
        second.close()
