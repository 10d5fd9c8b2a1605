"""From tokens to text as they come, with stop strings."""

from __future__ import annotations

from typing import Any

_UNFINISHED = "\ufffd"


class TextStream:
    """Decodes one token after another and watches for stop strings. Mutated by every call.

    Parameters
    ----------
    tokenizer : transformers tokenizer or None
        None for token ids without text.
    stops : tuple of str
        Text ends before the first of them.
    """

    def __init__(self, tokenizer: Any, stops: tuple[str, ...] = ()) -> None:
        self.text = ""
        self.stopped = False
        self._tokenizer = tokenizer
        self._stops = tuple(stop for stop in stops if stop)
        self._tokens: list[int] = []
        self._held = ""
        # Tokens before `_settled` are decoded for good; a few of them are context, since some tokenizers join words.
        self._context = 0
        self._settled = 0

    def push(self, token: int) -> str:
        """Take the next token and return the text that is certain now; sets `stopped` when a stop string is complete."""
        self._tokens.append(token)
        return self._release(self._decode_new(final=False), final=False)

    def flush(self) -> str:
        """Return what was held back, at the end of the sequence."""
        return self._release(self._decode_new(final=True), final=True)

    def _decode_new(self, final: bool) -> str:
        if self._tokenizer is None:
            return ""
        before = self._decode(self._tokens[self._context : self._settled])
        now = self._decode(self._tokens[self._context :])
        if now.endswith(_UNFINISHED) and not final:
            return ""  # a character whose bytes are still coming
        self._context, self._settled = self._settled, len(self._tokens)
        return now[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _release(self, new: str, final: bool) -> str:
        if self.stopped:
            return ""
        self._held += new
        ends = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if ends:
            self.stopped = True
            out = self._held[: min(ends)]
        elif final:
            out = self._held
        else:
            out = self._held[: len(self._held) - self._possible_stop()]
        self._held = "" if self.stopped else self._held[len(out) :]
        self.text += out
        return out

    def _possible_stop(self) -> int:
        """Length of the longest end of the held text that may grow into a stop string."""
        for size in range(min(len(self._held), max(map(len, self._stops), default=1) - 1), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0
