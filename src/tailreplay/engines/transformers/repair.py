"""Background repair: pages that stand behind an approximate hit are computed again exactly while nothing else runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from tailreplay.engines.transformers.sequence import Interrupted, Sequence
from tailreplay.keys import token_list
from tailreplay.modes import parse_reuse
from tailreplay.repairs import Repair

if TYPE_CHECKING:
    from tailreplay.engines.transformers.lm import HybridLM

log = logging.getLogger("tailreplay")
_CHUNK = 512
"""Tokens between two looks whether somebody waits."""


def repair_one(lm: HybridLM, waits: Callable[[], bool] = lambda: False) -> int:
    """Compute the sequence that was last answered approximately again, exactly. Returns how many tokens were computed.

    It takes what is exact already from the cache, states included, and stores the rest in place of the approximate pages;
    where the approximate hit ended, and at the end, it saves the states. If `waits` says that somebody wants the model it
    ends, and the sequence stays noted; whole pages so far are kept.

    Parameters
    ----------
    waits : callable
        Whether to make room now. Asked every 512 tokens.
    """
    repair = lm.repairs.take()
    if repair is None:
        return 0
    with lm.lock:
        if repair.namespace != lm.namespace(repair.namespace.salt):
            return 0  # weights or adapters are others now: nobody will look for its pages
        ids = token_list(repair.ids)
        try:
            return _compute(lm, ids, repair, waits)
        except Interrupted:
            lm.repairs.put_back(repair)
            return 0


def _compute(lm: HybridLM, ids: list[int], repair: Repair, waits: Callable[[], bool]) -> int:
    backbone = lm.backbone
    _save_at_branch(lm, ids, repair, waits)
    # A match never takes the last token: with one more it can take all of them.
    plan = lm.cache.lookup([*ids, ids[-1]], repair.namespace, parse_reuse("exact"), backbone.topology)
    sequence = Sequence(backbone, lm.cache, repair.namespace, len(ids))
    try:
        sequence.restore(plan, ids, min(_CHUNK, lm.prefill_chunk), interrupt=waits)
        if plan.matched:
            sequence.save_states()
        _extend(lm, sequence, ids, repair, waits)
        sequence.finish()
    finally:
        sequence.abandon()
        sequence.wait_loaded()
        lm.cache.release(plan)
    computed = len(sequence.tokens) - plan.matched
    log.debug("Repaired %d of %d tokens.", computed, len(ids))
    return computed


def _save_at_branch(lm: HybridLM, ids: list[int], repair: Repair, waits: Callable[[], bool]) -> None:
    """Save exact states where the approximate hit ended, if all before is exact: others are likely to end there, too."""
    plan = lm.cache.lookup([*ids[: repair.branch], 0], repair.namespace, parse_reuse("exact"), lm.backbone.topology)
    sequence = Sequence(lm.backbone, lm.cache, repair.namespace, repair.branch)
    try:
        if plan.matched == repair.branch and plan.replayed:
            sequence.restore(plan, ids[: repair.branch], min(_CHUNK, lm.prefill_chunk), interrupt=waits)
            sequence.save_states()
    finally:
        sequence.abandon()
        sequence.wait_loaded()
        lm.cache.release(plan)


def _extend(lm: HybridLM, sequence: Sequence, ids: list[int], repair: Repair, waits: Callable[[], bool]) -> None:
    # What cannot be stored, as in a full cache, is not worth computing.
    while sequence.is_storing and len(sequence.tokens) < len(ids):
        if waits():
            raise Interrupted
        start = len(sequence.tokens)
        stop = min(start + min(_CHUNK, lm.prefill_chunk), len(ids))
        if start < repair.branch < stop:
            stop = repair.branch
        sequence.extend(ids[start:stop])
        if stop == repair.branch:
            sequence.save_states()
