"""States after a match whose tail starts otherwise than in the paper: from an anchor's states, or without hiddens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tailreplay.costs import CostModel
from tailreplay.engines.transformers import compat
from tailreplay.engines.transformers.backbone import Backbone
from tailreplay.engines.transformers.replay import ReadHidden, replay
from tailreplay.evals.branches import KeysValues
from tailreplay.evals.mean_state import mix
from tailreplay.evals.start_rules import ANCHORED, DECAYED, MEAN, MIXED, RECOMPUTE, Start
from tailreplay.evals.trail import Trail
from tailreplay.topology import Topology


class KeptLayer(compat.DynamicLayer):  # type: ignore[misc]
    """Keys and values of one attention layer that are there already: what the model computes for them again is dropped.

    Parameters
    ----------
    keys, values : torch.Tensor
        Of all tokens, ``(m, kv_heads, head_dim)``.
    seen : int
        Tokens before the first one that will be run again.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, seen: int) -> None:
        super().__init__()
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        self._held = tuple(tensor.transpose(0, 1)[None] for tensor in (keys, values))
        self._seen = seen
        self._view()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values up to the last token run, as they were kept. Mutates self."""
        self._seen += key_states.shape[2]
        self._view()
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Return the number of tokens before the next one that is run."""
        return self._seen

    def _view(self) -> None:
        self.keys, self.values = (tensor[:, :, : self._seen] for tensor in self._held)


def rebuild(
    backbone: Backbone,
    start: Start,
    ids: Sequence[int],
    trail: Trail,
    kv: KeysValues,
    read_hidden: ReadHidden,
    chunk: int = 2048,
    mean: compat.DynamicCache | None = None,
) -> compat.DynamicCache:
    """Return the states after `ids`, rebuilt as `start` says.

    Parameters
    ----------
    trail : Trail
        Of these tokens, with the anchor that `start` asks for.
    kv : list of (keys, values)
        Of each attention layer, ``(m, kv_heads, head_dim)``.
    read_hidden : callable
        As `tailreplay.engines.transformers.replay.replay` wants it.
    chunk : int
        Longest run at once.
    mean : DynamicCache, optional
        The model's mean state, where `start` uses it.
    """
    matched = len(ids)
    cache = backbone.new_cache(1)
    if start.kind == RECOMPUTE:
        _recompute(backbone, cache, ids, start.longest(matched), kv, chunk)
        return cache
    if start.kind == MEAN:
        assert mean is not None
        compat.copy_states(mean, cache)
    else:
        _put_anchor(backbone, cache, start, matched, trail, mean)
    replay(backbone, cache, ids, tails(start, matched, backbone.topology), read_hidden, chunk)
    return cache


def _put_anchor(
    backbone: Backbone,
    cache: compat.DynamicCache,
    start: Start,
    matched: int,
    trail: Trail,
    mean: compat.DynamicCache | None,
) -> None:
    anchor = start.anchor_of(matched)
    trail.put(anchor, cache)
    stop = matched - start.longest(matched)
    if start.kind == DECAYED:
        trail.decay(cache, anchor, stop)
    if start.uses_mean and anchor < stop:
        assert mean is not None
        if not anchor:
            compat.copy_states(mean, cache)
        elif start.kind == MIXED:
            mix(backbone, cache, mean)
        else:
            trail.decay(cache, anchor, stop, mean)


def tails(start: Start, matched: int, topology: Topology) -> list[int]:
    """Return how many tokens each group replays."""
    if start.kind == ANCHORED:
        distance = start.longest(matched)
        return [min(distance, group.receptive_field or distance) for group in topology.groups]
    return [start.budget.tail(matched, group) for group in topology.groups]


def flops(costs: CostModel, start: Start, matched: int) -> float:
    """Return the operations that `rebuild` takes: of all layers without the output head for "recompute"."""
    if start.kind == RECOMPUTE:
        return costs.prefill_flops(matched - start.longest(matched), matched) - costs.head
    return costs.replay_flops(tails(start, matched, costs.topology))


def _recompute(
    backbone: Backbone, cache: compat.DynamicCache, ids: Sequence[int], tail: int, kv: KeysValues, chunk: int
) -> None:
    """Run the last `tail` tokens through the whole model from zero states, over the keys and values of all of them."""
    begin = len(ids) - tail
    for layer, (keys, values) in zip(backbone.topology.attention_layers, kv, strict=True):
        cache.layers[layer] = KeptLayer(keys, values, begin)
    for at in range(begin, len(ids), chunk):
        backbone.forward(list(ids[at : at + chunk]), at, cache, None)
