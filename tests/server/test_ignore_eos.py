"""`ignore_eos`, with a model whose end token is one that its answers are known to hold: the end of a line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tailreplay.cache import PrefixCache
from tailreplay.engines.transformers import HybridLM
from tailreplay.metrics import Metrics
from tailreplay.server.app import create_app
from tailreplay.server.worker import Worker
from tests.server.texts import document, question

TOKENS = 20


@pytest.fixture(scope="module")
def http() -> Iterator[TestClient]:
    lm = HybridLM.from_pretrained("bundled", cache=PrefixCache("16MiB"), replay="off", device="cpu")
    (lm.model.generation_config.eos_token_id,) = lm.encode("\n")
    metrics = Metrics()
    worker = Worker(metrics, 0)
    worker.start()
    with TestClient(create_app(lm, worker, metrics, "bundled")) as client:
        yield client
    worker.close()
    worker.join()


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("ignore", [True, False, None])
def test_answers_go_on_if_told_to(http: TestClient, chat: bool, ignore: bool | None) -> None:
    text, numbers = document(74, sentences=14)
    asked = f"{text}\n{question('stone')}"
    body: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0, "stop": [], "ignore_eos": ignore}
    if chat:
        body["messages"] = [{"role": "user", "content": asked}]
    else:
        body["prompt"] = f"{asked}\nAnswer: "
    answer = http.post(f"/v1/{'chat/' * chat}completions", json=body).raise_for_status().json()
    (choice,) = answer["choices"]
    said = choice["message"]["content"] if chat else choice["text"]
    if ignore:
        assert (answer["usage"]["completion_tokens"], choice["finish_reason"]) == (TOKENS, "length")
        assert said.startswith(f"{numbers['stone']}\n")
    else:
        assert answer["usage"]["completion_tokens"] < TOKENS
        assert choice["finish_reason"] == "stop"
        assert said.strip() == numbers["stone"]


def test_stop_strings_end_an_answer_all_the_same(http: TestClient) -> None:
    text, numbers = document(74, sentences=14)
    body = {"prompt": f"{text}\n{question('stone')}\nAnswer: ", "max_tokens": TOKENS, "ignore_eos": True, "stop": "\n"}
    choice = http.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (numbers["stone"], "stop")
