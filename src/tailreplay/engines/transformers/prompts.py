"""From prompts to token ids, with everything checked."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from tailreplay.errors import InvalidRequestError

Prompt = str | list[int]


class PromptEncoder:
    """Encodes texts and chats.

    Parameters
    ----------
    tokenizer : transformers tokenizer or None
        None if prompts are token ids.
    vocabulary : int
        Size of the model's vocabulary.
    limit : int or None
        Longest sequence of the model, the answer included.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, limit: int | None) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._limit = limit

    def encode(self, prompt: Prompt, add_special_tokens: bool = True) -> list[int]:
        """Return the prompt's token ids, checked against the vocabulary and the model's longest sequence.

        Raises
        ------
        InvalidRequestError
            If the prompt is empty, too long, or holds an id outside the vocabulary.
        """
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise InvalidRequestError("This model has no tokenizer: give token ids.", "prompt")
            self._check_length(len(prompt) // (4 * self._longest_token) + 1)
            ids = list(self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens))
        elif isinstance(prompt, list):
            ids = prompt
        else:
            raise InvalidRequestError(f"The prompt must be a text or a list of token ids, got {prompt!r}.", "prompt")
        if not ids:
            raise InvalidRequestError("The prompt is empty.", "prompt")
        if not all(isinstance(token, int) and 0 <= token < self._vocabulary for token in ids):
            raise InvalidRequestError(f"Token ids must be integers from 0 to {self._vocabulary - 1}.", "prompt")
        self._check_length(len(ids))
        return ids

    def _check_length(self, tokens: int) -> None:
        limit = self._limit
        if limit is not None and tokens >= limit:
            raise InvalidRequestError(
                f"The prompt has {tokens} tokens or more, but the model takes at most {limit - 1}: an answer must fit too.",
                "prompt",
            )

    @cached_property
    def _longest_token(self) -> int:
        # A text of n characters has at least n / (4 * this) tokens, whatever a normaliser joins: a text that is far too
        # long is refused before it is tokenised.
        return max(map(len, self._tokenizer.get_vocab()))

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Render chat messages with the tokenizer's template and return their token ids."""
        if self._tokenizer is None or not getattr(self._tokenizer, "chat_template", None):
            raise InvalidRequestError("This model has no chat template: use plain completions.", "messages")
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.encode(text, add_special_tokens=False)
