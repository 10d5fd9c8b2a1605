"""A client that knows what the server must have cached, from the token ids alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import openai

MIN_MATCH = 32
Message = dict[str, str]


@dataclass(frozen=True)
class Answer:
    """What a request brought back."""

    text: str
    finish_reason: str
    prompt_tokens: int
    cached: int
    report: dict[str, Any]


class Caller:
    """Sends requests under one salt, checks each one's `cached_tokens`, and remembers what is stored afterwards.

    The check is what this package is for: `cached_tokens` is the longest common prefix of token ids with anything
    computed before, less the last token where nothing else would be left to run.
    """

    def __init__(self, client: openai.OpenAI, tokenizer: Any, salt: str) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.salt = salt
        self.stored: list[list[int]] = []

    def complete(self, prompt: str | list[int], **options: Any) -> Answer:
        """Send a completion; greedy, one token unless `max_tokens` says more."""
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        wish, arguments = self._arguments(options)
        response = self.client.completions.create(model="bundled", prompt=prompt, **{"max_tokens": 1, **arguments})
        return self._checked(ids, response.choices[0].text, response, wish)

    def chat(self, messages: list[Message], **options: Any) -> Answer:
        """Send a chat; greedy."""
        wish, arguments = self._arguments(options)
        response = self.client.chat.completions.create(
            model="bundled",
            messages=messages,  # type: ignore[arg-type]
            **{"max_completion_tokens": 12, **arguments},
        )
        return self._checked(self.chat_ids(messages), response.choices[0].message.content, response, wish)

    def chat_ids(self, messages: list[Message]) -> list[int]:
        """Token ids of the chat's prompt."""
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids: list[int] = self.tokenizer.encode(text)
        return ids

    def expected(self, ids: list[int]) -> int:
        """What must be reused of a prompt now."""
        longest = max((common_prefix(ids, stored) for stored in self.stored), default=0)
        longest = min(longest, len(ids) - 1)
        return longest if longest >= MIN_MATCH else 0

    def _arguments(self, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        wish = {key: options.pop(key) for key in ("mode", "ratio", "error", "store") if key in options}
        extra = {"cache_salt": self.salt, **({"tailreplay": wish} if wish else {})}
        return wish, {"temperature": 0, "extra_body": extra, **options}

    def _checked(self, ids: list[int], text: str, response: Any, wish: dict[str, Any]) -> Answer:
        usage, report = response.usage, response.tailreplay
        reason = response.choices[0].finish_reason
        cached = usage.prompt_tokens_details.cached_tokens
        assert usage.prompt_tokens == len(ids)
        assert cached == report["matched"]
        if report["mode"] != "off":
            reusable = self.expected(ids)
            # Exact mode may find less: only exact pages count. Tests of that say themselves what they expect.
            assert cached == reusable if report["mode"] == "replay" else cached <= reusable
        if wish.get("store") is not False and report["mode"] != "zero":
            self.stored.append([*ids, *self._computed(text, reason, usage.completion_tokens)])
        return Answer(text, reason, usage.prompt_tokens, cached, report)

    def _computed(self, text: str, reason: str, count: int) -> list[int]:
        """Token ids of the answer that were computed: all but the last one sampled."""
        ids: list[int] = self.tokenizer.encode(text)
        if count == 1:
            return []
        if reason == "stop":  # the token that stopped it is not in the text
            assert len(ids) == count - 1
            return ids
        assert len(ids) == count
        return ids[:-1]


def common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix."""
    for index, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return index
    return min(len(a), len(b))
