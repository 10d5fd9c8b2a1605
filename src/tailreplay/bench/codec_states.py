"""What coded hiddens do to replayed states: beside the states that the same replay rebuilds from hiddens as they are."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from tailreplay.codecs import Codec
from tailreplay.engines.transformers import HybridLM, compat
from tailreplay.engines.transformers.capture import Sink
from tailreplay.engines.transformers.replay import replay
from tailreplay.errors import InvalidRequestError
from tailreplay.evals.material import python_topics
from tailreplay.evals.prefix import state_errors

Rows = list[torch.Tensor]


def state_rows(lm: HybridLM, ids: list[int], codecs: Sequence[Codec], ratios: Sequence[float]) -> list[dict[str, Any]]:
    """Replay `ids` by each codec and ratio; returns one row each.

    Errors are ``||S - S_lossless|| / ||S_lossless||`` of a layer's recurrent state, of the replay from decoded hiddens
    beside the replay of as many tokens from the hiddens as they are. Layers of the embedding group are left out: their
    input is not stored. The last two numbers of a row are the errors of the replay from decoded hiddens and of the
    lossless replay beside a full prefill, each the median over the same layers.
    """
    true, hiddens = _prefill(lm, ids)
    rows = []
    for ratio in ratios:
        tail = max(1, round(ratio * len(ids)))
        lossless = _replay(lm, ids, tail, hiddens)
        behind = statistics.median(_errors(lm, lossless, true))
        for codec in codecs:
            states = _replay(lm, ids, tail, [_through(codec, hidden) for hidden in hiddens])
            errors = _errors(lm, states, lossless)
            row: dict[str, Any] = {"codec": codec.name, "ratio": ratio, "tokens": len(ids), "replayed": tail}
            row |= {"layers": len(errors), "worst": max(errors), "median": statistics.median(errors)}
            row |= {"to_prefill": statistics.median(_errors(lm, states, true)), "to_prefill_lossless": behind}
            rows.append(row)
    return rows


def prose(lm: HybridLM, tokens: int) -> list[int]:
    """Return token ids of prose from Python's help topics.

    Raises
    ------
    InvalidRequestError
        If the model takes fewer tokens, or this Python has no help topics.
    """
    longest = lm.backbone.max_tokens
    if tokens < 2 or (longest is not None and tokens > longest):
        raise InvalidRequestError(f"The prompt must have 2 to {longest or 'any number of'} tokens, not {tokens}.")
    ids: list[int] = []
    passage = python_topics().passage(random.Random(0))
    while len(ids) < tokens:
        ids.extend(lm.encode(next(passage) + "\n", add_special_tokens=not ids))
    return ids[:tokens]


@torch.inference_mode()
def _prefill(lm: HybridLM, ids: list[int]) -> tuple[compat.DynamicCache, Rows]:
    """Return the states after `ids` and, by stored group, the hiddens ``(n, d_model)``."""
    backbone = lm.backbone
    cache = backbone.new_cache(len(ids))
    sink: Sink = [[] for _ in backbone.topology.stored_groups]
    with lm.lock:
        for start in range(0, len(ids), lm.prefill_chunk):
            backbone.forward(ids[start : start + lm.prefill_chunk], start, cache, sink)
    return cache, [torch.cat(taken) for taken in sink]


@torch.inference_mode()
def _replay(lm: HybridLM, ids: list[int], tail: int, hiddens: Rows) -> compat.DynamicCache:
    cache = lm.backbone.new_cache(1)
    with lm.lock:
        replay(
            lm.backbone,
            cache,
            ids,
            [tail] * len(lm.backbone.topology.groups),
            lambda group, start, stop: hiddens[group][None, start:stop],
            lm.prefill_chunk,
        )
    return cache


def _through(codec: Codec, hidden: torch.Tensor) -> torch.Tensor:
    size = codec.token_bytes(tuple(hidden.shape[1:]), hidden.dtype)
    coded = torch.empty(hidden.shape[0], size, dtype=torch.uint8, device=hidden.device)
    codec.encode(hidden, coded)
    decoded = torch.empty_like(hidden)
    codec.decode(coded, decoded)
    return decoded


def _errors(lm: HybridLM, states: compat.DynamicCache, others: compat.DynamicCache) -> list[float]:
    """Return the relative error of each recurrent state of the groups whose hiddens are stored."""
    groups = lm.backbone.topology.groups
    stored = [group.stores_hidden for group in groups for _ in group.stateful]
    errors = zip(stored, state_errors(lm, states, others), strict=True)
    found = [error for is_stored, error in errors if is_stored and error is not None]
    if not found:
        raise InvalidRequestError(
            "No recurrent state of this model is rebuilt from stored hiddens: nothing to compare."
        )
    return found
