"""Whether a model takes what a benchmark is asked to measure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailreplay.errors import InvalidRequestError

if TYPE_CHECKING:
    from tailreplay.engines.transformers import HybridLM


def check_fits(lm: HybridLM, tokens: int) -> None:
    """Raise `InvalidRequestError` if `tokens` tokens are more than the model's positions allow."""
    most = lm.backbone.max_tokens
    if most is not None and tokens > most:
        raise InvalidRequestError(
            f"Sequences of {tokens:,} tokens are asked for, but the model takes at most {most:,}."
        )
