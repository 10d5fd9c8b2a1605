"""What the harness asks for, read from its requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.utils import normalize_gen_kwargs

from tailreplay.errors import InvalidRequestError
from tailreplay.evals.lm_eval.splits import split_offset

# Longest answer of tasks that do not say, as in the harness.
DEFAULT_ANSWER_TOKENS = 256


@dataclass(frozen=True)
class Answering:
    """How long an answer may become, and the texts that end it."""

    max_tokens: int
    stop: list[str]


def answering(task: str | None, given: Mapping[str, Any], default_tokens: int, max_length: int) -> Answering:
    """Read a task's generation settings.

    Parameters
    ----------
    given : mapping
        The task's ``generation_kwargs``.
    default_tokens : int
        Longest answer of tasks that do not say.
    max_length : int
        Longest sequence of the model.

    Raises
    ------
    InvalidRequestError
        If the task wants sampled answers, or an answer leaves no room for the prompt.
    """
    settings: dict[str, Any] = dict(normalize_gen_kwargs(dict(given), default_tokens))
    if settings["do_sample"]:
        raise InvalidRequestError(
            f"Task '{task}' wants sampled answers, but methods are compared greedily: set do_sample=False in its "
            "generation settings."
        )
    if not 1 <= settings["max_gen_toks"] < max_length:
        raise InvalidRequestError(
            f"Task '{task}' wants answers of {settings['max_gen_toks']} tokens, but prompt and answer have "
            f"{max_length} tokens together."
        )
    return Answering(settings["max_gen_toks"], [stop for stop in settings["until"] if stop])


def query_offset(request: Instance, text: str) -> int | None:
    """Return where the query begins in `text`; see `split_offset`."""
    doc = request.doc if isinstance(request.doc, dict) else {}
    return split_offset(request.task_name or "", doc, text)


def by_context(requests: Sequence[Instance]) -> list[int]:
    """Return an order in which requests about one context come in a row, contexts as they first appear."""
    seen: dict[int, int] = {}
    places = []
    for index, request in enumerate(requests):
        text = request.args[0]
        # Of a text without a rule the whole is taken: the choices of a question have it in common.
        key = hash(text[: query_offset(request, text)])
        places.append((seen.setdefault(key, index), index))
    return [index for _, index in sorted(places)]
