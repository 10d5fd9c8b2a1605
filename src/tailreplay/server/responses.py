"""Response bodies of the OpenAI API, and what the cache did beside them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tailreplay.engines.transformers.results import GenerationResult


def reuse_report(results: Sequence[GenerationResult], queued: float) -> dict[str, Any]:
    """Describe what was reused: the object ``tailreplay`` of a response.

    Of several prompts, counts are sums, `exact` holds for all of them, `provenance` is the worst, and each one's own
    report is in ``prompts``.

    Parameters
    ----------
    queued : float
        Seconds that the request waited.
    """
    reports = [_report(result) for result in results]
    if len(reports) == 1:
        timings = {"queued": _milliseconds(queued), **reports[0]["timings_ms"]}
        return {**reports[0], "timings_ms": timings}
    worst = max((result.reuse for result in results), key=lambda reuse: (reuse.depth, not reuse.exact))
    return {
        **reports[0],
        "matched": sum(report["matched"] for report in reports),
        "replayed": sum(report["replayed"] for report in reports),
        "exact": all(report["exact"] for report in reports),
        "provenance": worst.provenance,
        "depth": worst.depth,
        "start": worst.start,
        "anchor": worst.anchor,
        "miss_reason": next((report["miss_reason"] for report in reports if report["miss_reason"]), ""),
        "timings_ms": {
            "queued": _milliseconds(queued),
            "total": round(sum(report["timings_ms"]["total"] for report in reports), 3),
        },
        "prompts": reports,
    }


def usage(results: Sequence[GenerationResult]) -> dict[str, Any]:
    """Return the ``usage`` object; `cached_tokens` is what was matched."""
    prompt = sum(result.reuse.prompt_tokens for result in results)
    completion = sum(len(result.tokens) for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(result.reuse.matched for result in results)},
    }


@dataclass
class CompletionFormat:
    """Bodies of ``/v1/completions``, for one request.

    Attributes
    ----------
    model : str
        Name that the response bears.
    """

    model: str
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def whole(self, results: Sequence[GenerationResult], queued: float) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        choices = [self.choice(index, result) for index, result in enumerate(results)]
        body = self._body(self.whole_object, choices)
        return {**body, "usage": usage(results), "tailreplay": reuse_report(results, queued)}

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return one event of a stream."""
        return self._body(self.chunk_object, choices)

    def choice(self, index: int, result: GenerationResult) -> dict[str, Any]:
        """Return a finished choice."""
        return {"index": index, "text": result.text, "logprobs": None, "finish_reason": result.finish_reason}

    def opening(self, index: int) -> list[dict[str, Any]]:
        """Return the choices that open a stream, before any text."""
        return []

    def piece(self, index: int, text: str) -> dict[str, Any]:
        """Return a choice with more text."""
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def last(self, index: int, result: GenerationResult) -> dict[str, Any]:
        """Return the choice that ends a stream."""
        return {"index": index, "text": "", "logprobs": None, "finish_reason": result.finish_reason}

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


@dataclass
class ChatFormat(CompletionFormat):
    """Bodies of ``/v1/chat/completions``, for one request."""

    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, index: int, result: GenerationResult) -> dict[str, Any]:
        message = {"role": "assistant", "content": result.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": result.finish_reason}

    def opening(self, index: int) -> list[dict[str, Any]]:
        return [self._delta(index, {"role": "assistant", "content": ""})]

    def piece(self, index: int, text: str) -> dict[str, Any]:
        return self._delta(index, {"content": text})

    def last(self, index: int, result: GenerationResult) -> dict[str, Any]:
        return self._delta(index, {}, result.finish_reason)

    @staticmethod
    def _delta(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _report(result: GenerationResult) -> dict[str, Any]:
    reuse = result.reuse
    return {
        "matched": reuse.matched,
        "replayed": reuse.replayed,
        "mode": reuse.mode,
        "ratio": reuse.ratio,
        "exact": reuse.exact,
        "provenance": reuse.provenance,
        "depth": reuse.depth,
        "start": reuse.start,
        "anchor": reuse.anchor,
        "miss_reason": reuse.miss_reason,
        "stop": reuse.stop,
        "short_tail": reuse.short_tail,
        "predicted_error": reuse.predicted_error,
        "budget_note": reuse.budget_note,
        "timings_ms": {name: _milliseconds(seconds) for name, seconds in result.timings.to_dict().items()},
    }


def _milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 3)
