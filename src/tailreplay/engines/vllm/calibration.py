"""Who asks for the model's mean state: vLLM's server by itself while nobody waits, or an `LLM`'s user by hand."""

from __future__ import annotations

import json
import logging
from collections.abc import MutableMapping
from typing import Any

from tailreplay.mean_states import TOKENS
from tailreplay.prose import calibration_text

log = logging.getLogger("vllm.tailreplay")
Message = MutableMapping[str, Any]

OPTIONS = {"tailreplay": {"calibrate": True}}
SALT = "tailreplay mean state"
"""Nobody else's pages: the text would be found by others otherwise. The same after a restart: tiers may still have it."""
TIMES = 2
"""The first request stores the text's pages, the second replays them."""
_CHARACTERS, _FEWEST = 8000, 1000


class Calibration:
    """What a server's middleware asks its own application so that the engine makes a mean state."""

    def __init__(self) -> None:
        self._scope: Message | None = None
        self._characters = _CHARACTERS
        self._left = TIMES

    def again(self) -> None:
        """The engine may have lost its mean state: ask anew."""
        self._left = TIMES

    def as_asked(self, scope: Message) -> None:
        """Take the headers, such as the server's key, and the address from a request that somebody has sent."""
        self._scope = {**scope, "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b""}

    def due(self) -> tuple[Message, bytes] | None:
        """Return the next request; None if there is none for now."""
        if self._scope is None or not self._left:
            return None
        prompt = calibration_text()[: self._characters]
        request = {"prompt": prompt, "max_tokens": 1, "cache_salt": SALT, "kv_transfer_params": OPTIONS}
        return self._scope, json.dumps(request).encode()

    def answered(self, status: int) -> None:
        """Take the status of the answer to the request that was due."""
        if status == 200:
            self._left -= 1
        elif status == 400 and self._characters > _FEWEST:
            self._characters //= 2  # longer than the server's longest prompt
        elif status == 400:
            self._left = 0
            log.warning("The model has no mean state: the server refuses the text that it would be made from.")
        else:
            self._scope = None  # with the headers of the next request, then


def calibrate(llm: Any, text: str | None = None) -> None:
    """Let the engine of a vLLM `LLM` make the model's mean state, which tails then begin with where no anchor is near.

    Parameters
    ----------
    llm : vllm.LLM
        With the connector.
    text : str, optional
        Some 2,000 tokens of the kind that the model will read; English prose if not given.
    """
    from vllm import SamplingParams

    ids = llm.get_tokenizer().encode(calibration_text() if text is None else text, add_special_tokens=False)
    # The last token of a prompt is always computed.
    ids = ids[: min(TOKENS, llm.llm_engine.model_config.max_model_len - 2) + 1]
    params = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": OPTIONS})
    for _ in range(TIMES):
        llm.generate([{"prompt_token_ids": ids, "cache_salt": SALT}], params, use_tqdm=False)
