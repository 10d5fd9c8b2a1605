"""Prompts as token ids, cut at a token boundary. The ids are those of the whole text, whatever the cut."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """A prompt's token ids.

    Attributes
    ----------
    ids : list of int
    cached : int
        How many of the first ids are the context; fewer than there are ids.
    """

    ids: list[int]
    cached: int

    def last(self, tokens: int) -> Prompt:
        """Return the prompt with at most its last `tokens` tokens."""
        dropped = max(0, len(self.ids) - tokens)
        return Prompt(self.ids[dropped:], max(0, self.cached - dropped))


class PromptCutter:
    """Tokenises texts and cuts them.

    Parameters
    ----------
    tokenizer : transformers tokenizer
    query_tokens : int
        Length of the query where no rule says where it begins.
    """

    def __init__(self, tokenizer: Any, query_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._query_tokens = query_tokens

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Return the token ids of a text. None adds special tokens unless the text begins with the first of them."""
        return list(self._tokenizer.encode(text, add_special_tokens=self._special(text, add_special_tokens)))

    def cut(self, text: str, offset: int | None) -> Prompt:
        """Return the prompt whose query begins at character `offset`, or is the last tokens if it is None.

        A token that lies on both sides of the cut belongs to the query, which has at least one token.
        """
        if offset is None:
            ids = self.encode(text)
            return self.cut_last(ids)
        if not self._tokenizer.is_fast:
            return self._cut_slow(text, offset)
        encoded = self._tokenizer(text, add_special_tokens=self._special(text), return_offsets_mapping=True)
        ids = list(encoded["input_ids"])
        ends = [end for _, end in encoded["offset_mapping"]]
        return Prompt(ids, min(bisect_right(ends, offset), len(ids) - 1))

    def cut_last(self, ids: list[int]) -> Prompt:
        """Return the prompt whose last tokens are the query."""
        return Prompt(ids, max(0, len(ids) - self._query_tokens))

    def _cut_slow(self, text: str, offset: int) -> Prompt:
        """Cut without offsets, which only fast tokenizers know: where the context's own tokens cease to be the text's."""
        ids, context = self.encode(text), self.encode(text[:offset])
        same = next((at for at, (a, b) in enumerate(zip(ids, context, strict=False)) if a != b), len(context))
        return Prompt(ids, min(same, len(ids) - 1))

    def _special(self, text: str, wanted: bool | None = None) -> bool:
        if wanted is not None:
            return wanted
        # Chat templates write the token that begins a text, which must not come twice.
        first = self._tokenizer.bos_token
        return not (first and text.startswith(first))
