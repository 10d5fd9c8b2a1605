"""Bad input: the right status, one sentence in OpenAI's error shape, and a server that goes on."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.server.test_modes import metrics

PROMPT: dict[str, Any] = {"prompt": "Hello there.", "max_tokens": 1}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello there."}], "max_tokens": 1}


def wish(**fields: Any) -> dict[str, Any]:
    return {"tailreplay": fields}


BODIES = {
    "empty prompt": ({"prompt": ""}, "prompt", "The prompt is empty."),
    "empty list": ({"prompt": []}, "prompt", "The prompt is empty."),
    "one empty prompt": ({"prompt": ["a", ""]}, "prompt", "The prompt is empty."),
    "one empty list": ({"prompt": [[1], []]}, "prompt", "The prompt is empty."),
    "no prompt": ({"prompt": None}, "prompt", "must be a string, a list of strings"),
    "mixed prompt": ({"prompt": ["a", 1]}, "prompt", "must be a string, a list of strings"),
    "boolean ids": ({"prompt": [True, False]}, "prompt", "must be a string, a list of strings"),
    "object prompt": ({"prompt": {"a": 1}}, "prompt", "must be a string, a list of strings"),
    "long prompt": ({"prompt": [5] * 8192}, "prompt", "has 8192 tokens or more, but the model takes at most 8191"),
    "unknown id": ({"prompt": [2048]}, "prompt", "from 0 to 2047"),
    "negative id": ({"prompt": [-1]}, "prompt", "from 0 to 2047"),
    "huge id": ({"prompt": [1 << 70]}, "prompt", "from 0 to 2047"),
    "no tokens": ({"max_tokens": 0}, "max_tokens", "at least 1, got 0"),
    "negative tokens": ({"max_completion_tokens": -5}, "max_tokens", "at least 1, got -5"),
    "tokens in words": ({"max_tokens": "ten"}, "max_tokens", "valid integer, got 'ten'"),
    "temperature below zero": ({"temperature": -0.1}, "temperature", "must not be negative"),
    "temperature in words": ({"temperature": "hot"}, "temperature", "valid number, got 'hot'"),
    "top_p of zero": ({"top_p": 0}, "top_p", "must be in (0, 1]"),
    "top_p above one": ({"top_p": 1.1}, "top_p", "must be in (0, 1]"),
    "top_k below zero": ({"top_k": -2}, "top_k", "must be at least 0"),
    "huge seed": ({"seed": 1 << 64}, "seed", "must fit 64 bits"),
    "seed below the least": ({"seed": -(1 << 63)}, "seed", "must fit 64 bits"),
    "ignore_eos in words": ({"ignore_eos": "yes"}, "ignore_eos", "valid boolean, got 'yes'"),
    "stop of numbers": ({"stop": [1]}, "stop", "a string or a list of strings"),
    "stream in words": ({"stream": "yes"}, "stream", "valid boolean, got 'yes'"),
    "usage in words": ({"stream_options": {"include_usage": "y"}}, "stream_options.include_usage", "valid boolean"),
    "model of numbers": ({"model": 3}, "model", "valid string, got 3"),
    "salt of numbers": ({"cache_salt": 3}, "cache_salt", "must be a string"),
    "empty salt": ({"cache_salt": ""}, "cache_salt", "not empty"),
    "unknown key": (wish(modus="exact"), "tailreplay", "no key 'modus', only mode, ratio, error, store"),
    "unknown mode": (wish(mode="fast"), "tailreplay.mode", "one of replay, exact, zero, off, got 'fast'"),
    "mode of lists": (wish(mode=["exact"]), "tailreplay.mode", "one of replay, exact, zero, off"),
    "ratio of zero": (wish(ratio=0), "tailreplay.ratio", "(0, 1], got 0"),
    "ratio above one": (wish(mode="replay", ratio=1.5), "tailreplay.ratio", "(0, 1], got 1.5"),
    "ratio in words": (wish(ratio="abc"), "tailreplay.ratio", "(0, 1], got 'abc'"),
    "ratio of truth": (wish(ratio=True), "tailreplay.ratio", "(0, 1], got True"),
    "ratio of another mode": (wish(mode="exact", ratio=0.1), "tailreplay.ratio", "goes with mode 'replay' only"),
    "error of zero": (wish(error=0), "tailreplay.error", "The state error must be a number in (0, 1], got 0"),
    "error above one": (wish(mode="replay", error=2), "tailreplay.error", "(0, 1], got 2"),
    "error in words": (wish(error="small"), "tailreplay.error", "(0, 1], got 'small'"),
    "error and ratio": (wish(error=0.1, ratio=0.1), "tailreplay.error", "either a ratio or a state error, not both"),
    "error of another mode": (wish(mode="zero", error=0.1), "tailreplay.error", "goes with mode 'replay' only"),
    "store in words": (wish(store="no"), "tailreplay.store", "must be true or false, got 'no'"),
    "mode without object": ({"tailreplay": "exact"}, "tailreplay", "must be an object"),
    "parameters in words": ({"kv_transfer_params": "exact"}, "kv_transfer_params", "must be an object"),
    "wrong in parameters": (
        {"kv_transfer_params": {"tailreplay": {"mode": "x"}}},
        "kv_transfer_params.tailreplay.mode",
        "one of replay, exact, zero, off",
    ),
    "both": ({**wish(mode="off"), "kv_transfer_params": {"tailreplay": {}}}, "tailreplay", "not both"),
    "n": ({"n": 2}, "n", "'n' is not supported (only 1 is)."),
    "best_of": ({"best_of": 3}, "best_of", "'best_of' is not supported"),
    "logprobs": ({"logprobs": 0}, "logprobs", "'logprobs' is not supported."),
    "echo": ({"echo": True}, "echo", "'echo' is not supported."),
    "suffix": ({"suffix": "end"}, "suffix", "'suffix' is not supported."),
    "logit_bias": ({"logit_bias": {"5": 1}}, "logit_bias", "'logit_bias' is not supported."),
    "presence_penalty": ({"presence_penalty": 0.5}, "presence_penalty", "'presence_penalty' is not supported."),
    "response_format": ({"response_format": {"type": "json_object"}}, "response_format", "is not supported."),
}
CHATS = {
    "no messages": ({"messages": []}, "messages", "at least 1"),
    "messages in words": ({"messages": "hello"}, "messages", "valid list, got 'hello'"),
    "no role": ({"messages": [{"content": "a"}]}, "messages.0.role", "is missing"),
    "unknown role": ({"messages": [{"role": "king", "content": "a"}]}, "messages.0.role", "'system', 'developer'"),
    "tool role": ({"messages": [{"role": "tool", "content": "a"}]}, "messages", "role 'tool' are not supported"),
    "no content": ({"messages": [{"role": "user"}]}, "messages", "has no content"),
    "numbers": ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content", "valid string, got 3"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
        "messages",
        "Only parts of the type 'text'",
    ),
    "tool calls": (
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}]},
        "messages",
        "Tool calls in messages are not supported.",
    ),
    "tools": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "'tools' is not supported."),
    "logprobs": ({"logprobs": True}, "logprobs", "'logprobs' is not supported."),
    "long chat": ({"messages": [{"role": "user", "content": "a b " * 9000}]}, "prompt", "takes at most 8191"),
    "unknown mode": (wish(mode="fast"), "tailreplay.mode", "one of replay, exact, zero, off, got 'fast'"),
}
RAW = {
    "no JSON": (b"{", "not valid JSON"),
    "nothing": (b"", "not valid JSON"),
    "half a character": (rb'{"prompt": "a\ud800"}', "half of a character"),
    "a list": (b"[1]", "must be a JSON object"),
    "not a number": (b'{"prompt": "a", "temperature": NaN}', "not valid JSON: NaN is no JSON number"),
    "not text": (b"\xff\xfe\xfd", "not valid JSON"),
    "a well": (b"[" * 100_000, "not valid JSON"),
}


def refused(response: httpx.Response, status: int, text: str, param: str | None) -> dict[str, Any]:
    """Assert that a response is an error that says `text` in one sentence, and return it."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert text in error["message"]
    assert error["message"].endswith(".")
    assert "\n" not in error["message"]
    assert len(error["message"]) < 250
    assert error["param"] == param
    return error


def still_answers(http: httpx.Client) -> None:
    """Assert that the server is well."""
    assert http.post("/v1/completions", json={**PROMPT, "model": "bundled"}).status_code == 200


@pytest.mark.parametrize("name", BODIES)
def test_completion_is_refused(http: httpx.Client, name: str) -> None:
    fields, param, text = BODIES[name]
    refused(http.post("/v1/completions", content=json.dumps({**PROMPT, **fields})), 400, text, param)
    still_answers(http)


@pytest.mark.parametrize("name", CHATS)
def test_chat_is_refused(http: httpx.Client, name: str) -> None:
    fields, param, text = CHATS[name]
    refused(http.post("/v1/chat/completions", json={**CHAT, **fields}), 400, text, param)
    still_answers(http)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("name", RAW)
def test_body_is_refused(http: httpx.Client, path: str, name: str) -> None:
    content, text = RAW[name]
    refused(http.post(path, content=content), 400, text, None)
    still_answers(http)


def test_missing_fields(http: httpx.Client) -> None:
    refused(http.post("/v1/completions", json={}), 400, "'prompt' is missing.", "prompt")
    refused(http.post("/v1/chat/completions", json={}), 400, "'messages' is missing.", "messages")


def test_bad_streams_are_refused_before_they_begin(http: httpx.Client) -> None:
    refused(http.post("/v1/completions", json={**PROMPT, "prompt": "", "stream": True}), 400, "empty", "prompt")


def test_unknown_model(http: httpx.Client, client: openai.OpenAI) -> None:
    for path, body in (("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)):
        error = refused(http.post(path, json={**body, "model": "gpt"}), 404, "no model 'gpt' here", "model")
        assert error["code"] == "model_not_found"
    refused(http.get("/v1/models/a/b"), 404, "no model 'a/b' here", "model")
    with pytest.raises(openai.NotFoundError, match="no model 'gpt' here"):
        client.completions.create(model="gpt", prompt="a")


def test_unknown_paths_and_methods(http: httpx.Client) -> None:
    refused(http.get("/v2"), 404, "nothing at /v2", None)
    refused(http.get("/v1/completions"), 405, "GET is not allowed at /v1/completions", None)


def test_client_reads_the_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="mode must be one of") as caught:
        client.completions.create(model="bundled", prompt="a", extra_body=wish(mode="fast"))
    assert caught.value.param == "tailreplay.mode"
    assert caught.value.type == "invalid_request_error"


def test_harmless_and_neutral_fields_are_ignored(http: httpx.Client) -> None:
    neutral = {"n": 1, "logprobs": None, "logit_bias": {}, "presence_penalty": 0, "user": "me", "metadata": {"a": "b"}}
    neutral |= {"best_of": 1, "echo": False, "tools": [], "response_format": {"type": "text"}, "made_up": 1}
    neutral |= {"tailreplay": None, "cache_salt": None, "kv_transfer_params": {"other": 1}, "stop": None, "seed": None}
    assert http.post("/v1/completions", json={**PROMPT, **neutral}).status_code == 200
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there."}]
    chat = {
        "messages": [{"role": "developer", "content": "Be kind."}, {"role": "user", "name": "me", "content": parts}]
    }
    assert http.post("/v1/chat/completions", json={**CHAT, **neutral, **chat, "logprobs": False}).status_code == 200


def test_extreme_but_valid_values(http: httpx.Client) -> None:
    seeds = ({"seed": seed} for seed in (-1, (1 << 63) - 1, 1 - (1 << 63)))
    for fields in ({"temperature": 1e-30}, {"temperature": 1e30}, {"top_p": 1e-30}, {"top_k": 10**9}, *seeds):
        body = {**PROMPT, "temperature": 1.0, **fields}
        assert http.post("/v1/completions", json=body).status_code == 200, fields


def test_limit_of_tokens_is_the_models(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": [5] * 8190, "max_tokens": 10**12, "stop": []})
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] <= 2


def test_refusals_are_counted(http: httpx.Client) -> None:
    series = 'tailreplay_requests_total{outcome="invalid"}'
    before = metrics(http)[series]
    http.post("/v1/completions", json={"prompt": ""})
    http.post("/v1/completions", json={**PROMPT, "model": "gpt"})
    assert metrics(http)[series] == before + 2
