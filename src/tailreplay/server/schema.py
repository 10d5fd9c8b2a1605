"""Request bodies of the OpenAI API, as far as this server honours them."""

from __future__ import annotations

import json
import re
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from tailreplay.errors import InvalidRequestError
from tailreplay.server.unsupported import check_supported

Body = TypeVar("Body", bound="CommonRequest")
# JSON can spell what UTF-8 and tokenizers cannot. Whole pairs match too, so this only says when to look closer.
_ESCAPED_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_WRONG_PROMPT = "'prompt' must be a string, a list of strings, a list of token ids, or a list of such lists."


class StreamOptions(BaseModel):
    """``stream_options``."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class CommonRequest(BaseModel):
    """Fields that completions and chat completions share. Unknown fields are ignored."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _check_stop(cls, stop: Any) -> Any:
        if stop is None or isinstance(stop, str) or (isinstance(stop, list) and all(isinstance(s, str) for s in stop)):
            return stop
        raise InvalidRequestError("'stop' must be a string or a list of strings.", "stop")

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk that tells the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self, default_tokens: int) -> dict[str, Any]:
        """Return the arguments that `HybridLM.stream` takes; None where the model decides."""
        limits = (self.max_completion_tokens, self.max_tokens, default_tokens)
        return {
            "max_new_tokens": next(limit for limit in limits if limit is not None),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "stop": self.stop,
            "ignore_eos": self.ignore_eos,
        }


class CompletionRequest(CommonRequest):
    """Body of ``/v1/completions``. `prompt` is always a list: of texts, or of lists of token ids."""

    prompt: list[str] | list[list[int]]

    @field_validator("prompt", mode="before")
    @classmethod
    def _as_list(cls, prompt: Any) -> list[str] | list[list[int]]:
        if isinstance(prompt, str):
            return [prompt]
        if not isinstance(prompt, list):
            raise InvalidRequestError(_WRONG_PROMPT, "prompt")
        if not prompt:
            raise InvalidRequestError("The prompt is empty.", "prompt")
        if _are_ids(prompt):
            return [prompt]
        if all(isinstance(part, str) for part in prompt) or all(isinstance(p, list) and _are_ids(p) for p in prompt):
            return prompt
        raise InvalidRequestError(_WRONG_PROMPT, "prompt")


class Message(BaseModel):
    """One message of a chat; `content` is text. Other fields go to the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | None = None

    @field_validator("role", mode="before")
    @classmethod
    def _check_role(cls, role: Any) -> Any:
        if role in ("tool", "function"):
            raise InvalidRequestError(f"Messages of the role {role!r} are not supported.", "messages")
        return role

    @field_validator("content", mode="before")
    @classmethod
    def _as_text(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        texts = [text for text in parts if isinstance(text, str)]
        if len(texts) < len(content):
            raise InvalidRequestError("Only parts of the type 'text' are supported in a message.", "messages")
        return "".join(texts)

    def for_template(self) -> dict[str, Any]:
        """Return what chat templates know: they have no word for developers."""
        fields = self.model_dump()
        if fields.get("tool_calls") or fields.get("function_call"):
            raise InvalidRequestError("Tool calls in messages are not supported.", "messages")
        if self.content is None and self.role != "assistant":
            raise InvalidRequestError(f"A message of the role {self.role!r} has no content.", "messages")
        return {**fields, "role": "system" if self.role == "developer" else self.role, "content": self.content or ""}


class ChatRequest(CommonRequest):
    """Body of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)


def parse_json(raw: bytes) -> dict[str, Any]:
    """Read a request's body; raises `InvalidRequestError` unless it is a JSON object."""
    try:
        body = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"The request's body is not valid JSON: {error}.") from None
    if _ESCAPED_HALF.search(raw) and not _is_text(body):
        raise InvalidRequestError("The request's body holds half of a character (a lone surrogate), which is no text.")
    if not isinstance(body, dict):
        raise InvalidRequestError("The request's body must be a JSON object.")
    return body


def parse_body(kind: type[Body], body: dict[str, Any]) -> Body:
    """Check a request's fields; raises `InvalidRequestError` with one sentence about the first that is wrong."""
    check_supported(body)
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            raise InvalidRequestError(f"'{field}' is missing.", field) from None
        problem = first["msg"][:1].lower() + first["msg"][1:]
        raise InvalidRequestError(f"'{field}' is wrong: {problem}, got {_short(first['input'])}.", field) from None


def _are_ids(prompt: list[Any]) -> bool:
    return all(isinstance(token, int) and not isinstance(token, bool) for token in prompt)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _is_text(body: Any) -> bool:
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
