"""Server-sent events, read by the unmodified client and raw."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai

from tests.server.caller import Caller
from tests.server.texts import document, ids_of, question


def test_chat_with_usage(client: openai.OpenAI, caller: Caller) -> None:
    text, numbers = document(70)
    messages: Any = [{"role": "user", "content": f"{text}\n{question('river')}"}]
    whole = caller.chat(messages)
    stream = client.chat.completions.create(
        model="bundled",
        messages=messages,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"cache_salt": caller.salt, "tailreplay": {"mode": "exact"}},
    )
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == whole.text == numbers["river"]
    assert sum(map(bool, pieces)) > 1
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all(chunk.usage is None for chunk in chunks)
    assert not any(hasattr(chunk, "tailreplay") for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details.cached_tokens == whole.prompt_tokens - 1
    assert last.usage.completion_tokens == 6
    report: dict[str, Any] = last.tailreplay  # type: ignore[attr-defined]
    assert (report["mode"], report["matched"], report["exact"]) == ("exact", whole.prompt_tokens - 1, True)
    assert report["timings_ms"]["total"] > 0
    assert len({chunk.id for chunk in [*chunks, last]}) == 1


def test_without_usage_the_last_chunk_has_the_report(client: openai.OpenAI, tokenizer: Any, caller: Caller) -> None:
    ids = ids_of(tokenizer, 71, 300)
    whole = caller.complete(ids, max_tokens=6, stop=[])
    stream = client.completions.create(
        model="bundled",
        prompt=ids,
        max_tokens=6,
        temperature=0,
        stream=True,
        extra_body={"cache_salt": caller.salt, "stop": [], "tailreplay": {"mode": "exact"}},
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in [*chunks, last]) == whole.text
    assert last.choices[0].finish_reason == "length"
    assert last.tailreplay["matched"] == 299  # type: ignore[attr-defined]
    assert not any(hasattr(chunk, "tailreplay") for chunk in chunks)


def test_events_on_the_wire(http: httpx.Client, caller: Caller, tokenizer: Any) -> None:
    prompts = [ids_of(tokenizer, seed, 100) for seed in (72, 73)]
    body = {"prompt": prompts, "max_tokens": 2, "stop": [], "stream": True, "cache_salt": caller.salt}
    response = http.post("/v1/completions", json={**body, "stream_options": {"include_usage": True}})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert all(chunk["object"] == "text_completion" for chunk in chunks)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["usage"]["prompt_tokens"] == 200
    assert [part["matched"] for part in chunks[-1]["tailreplay"]["prompts"]] == [0, 0]
    ends = [(c["choices"][0]["index"], c["choices"][0]["finish_reason"]) for c in chunks[:-1]]
    assert [end for end in ends if end[1]] == [(0, "length"), (1, "length")]


def test_stop_strings_and_seeds(caller: Caller) -> None:
    text, numbers = document(74)
    messages = [{"role": "user", "content": f"{text}\n{question('stone')}"}]
    number = numbers["stone"]
    # The request's own stop strings take the place of the model's.
    assert caller.chat(messages, max_completion_tokens=5, stop=[number[3:]], store=False).text == number[:3]
    first, second = (
        caller.chat(messages, temperature=1.0, top_p=0.9, seed=7, max_completion_tokens=8, mode="exact", store=False)
        for _ in range(2)
    )
    assert first.text == second.text


def test_model_list(client: openai.OpenAI, http: httpx.Client) -> None:
    assert [model.id for model in client.models.list()] == ["bundled"]
    assert client.models.retrieve("bundled").id == "bundled"
    assert http.get("/v1/models").json()["data"][0]["max_model_len"] == 8192
    assert http.get("/health").json() == {"status": "ok"}
