"""A model's mean state: what its states are like after English prose, whatever it says."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import torch

from tailreplay.engines.transformers import HybridLM, compat
from tailreplay.evals.trail import stateful_layers

TOKENS, EVERY, FIRST = 2048, 64, 256
_MODULES = (
    *("decimal", "doctest", "difflib", "string", "argparse", "logging", "optparse", "pickletools", "threading"),
    *("tempfile", "random", "turtle", "statistics", "zipfile", "shlex", "csv", "ast", "datetime"),
)


def calibration_text() -> str:
    """Return some pages of prose that come with Python and are in no task: what its modules say of themselves."""
    texts = [import_module(name).__doc__ or "" for name in _MODULES]
    return "\n\n".join(" ".join(text.split()) for text in texts)


@torch.inference_mode()
def mean_state(lm: HybridLM, ids: Sequence[int], every: int = EVERY, first: int = FIRST) -> compat.DynamicCache:
    """Return the mean of the states after every so many tokens of a text, from its `first` token on.

    Parameters
    ----------
    ids : sequence of int
        More than `first` tokens; the first `TOKENS` are used.
    """
    backbone = lm.backbone
    ids = list(ids[:TOKENS])
    past, mean = backbone.new_cache(len(ids)), compat.new_cache(backbone.config)
    count = 0
    with lm.lock:
        for start in range(0, len(ids), every):
            backbone.forward(ids[start : start + every], start, past, None)
            if start + every >= first:
                count += 1
                _take_in(past, mean, stateful_layers(backbone), count)
    return mean


def blend(target: compat.DynamicCache, other: compat.DynamicCache, layers: Sequence[int], share: float) -> None:
    """Move recurrent states by `share` of the way to `other`'s. Mutates `target`; convolution states stay as they are."""
    for layer in layers:
        state, towards = compat.states(target, layer)[1], compat.states(other, layer)[1]
        if state is not None and towards is not None:
            state.lerp_(towards.to(state.dtype), share)


def _take_in(past: compat.DynamicCache, mean: compat.DynamicCache, layers: Sequence[int], count: int) -> None:
    if count == 1:
        compat.copy_states(past, mean)
        return
    for layer in layers:
        for state, sum_so_far in zip(compat.states(past, layer), compat.states(mean, layer), strict=True):
            if state is not None and sum_so_far is not None:
                sum_so_far.lerp_(state, 1 / count)
