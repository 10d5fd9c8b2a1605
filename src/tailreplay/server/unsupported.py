"""Request fields that would change the answer and that this server cannot honour: refused, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tailreplay.errors import InvalidRequestError

# Field -> the values that ask for nothing beyond what the server does anyway. null never does.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (False,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "length_penalty": (1, 1.0),
    "min_p": (0, 0.0),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "logits_processors": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}


def check_supported(body: Mapping[str, Any]) -> None:
    """Raise `InvalidRequestError` if a request asks for something that the server cannot do."""
    for name, neutral in _NEUTRAL.items():
        value = body.get(name)
        # Types are compared too: 0 asks for the chosen token's log-probability, and equals False.
        if value is None or any(type(value) is type(wanted) and value == wanted for wanted in neutral):
            continue
        only = f" (only {' or '.join(map(repr, neutral))} is)" if len(neutral) == 1 and neutral[0] == 1 else ""
        raise InvalidRequestError(f"'{name}' is not supported{only}.", name)
