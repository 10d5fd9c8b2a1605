"""Whether a request waits for another one that is just computing its prefix."""

from __future__ import annotations

import time
from collections.abc import Iterable

from tailreplay.engines.vllm.tracked import Tracked
from tailreplay.keys import TOKEN_BYTES, common_tokens

_WORTH_WAITING = 64


def still_waits(tracked: Tracked, seconds: float) -> bool:
    """Whether nothing has changed since a request was told to wait: vLLM asks again in every step.

    Parameters
    ----------
    seconds : float
        Longest wait since the first look-up.
    """
    if tracked.waits_for is None or time.monotonic() - tracked.first_asked > seconds:
        return False
    other, stored, puts = tracked.waits_for
    return other.is_storing and (other.stored, other.puts) == (stored, puts)


def writer_of(tracked: Tracked, others: Iterable[Tracked], ids: bytes, matched: int, min_match: int) -> Tracked | None:
    """Return the request that will store more of `ids` than is matched yet, so much that waiting for it is worth it.

    Parameters
    ----------
    ids : bytes
        Tokens of the request that may wait (see `tailreplay.keys.token_bytes`).
    matched : int
        How many of them are stored now.
    """
    terms = tracked.options.reuse.terms
    limit = len(ids) // TOKEN_BYTES - 1
    for other in others:
        if other is tracked or not other.is_storing or other.namespace != tracked.namespace:
            continue
        if not terms.take(other.provenance):
            continue
        common = min(common_tokens(other.expected, ids), limit)
        # What is just landing is there in a step or two; a prefill takes longer and must be worth the wait.
        worth = _WORTH_WAITING if other.in_flight else 1
        if common - matched >= worth and common >= min_match:
            return other
    return None
