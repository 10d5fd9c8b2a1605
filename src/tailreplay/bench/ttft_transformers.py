"""Time to first token in the transformers engine."""

from __future__ import annotations

from typing import Any

import torch

from tailreplay.ablation import Ablation
from tailreplay.bench.memory_copies import copy_bandwidth
from tailreplay.bench.ttft_needs import needs_of
from tailreplay.bench.ttft_plan import Target, TtftPlan
from tailreplay.bench.ttft_rows import Sample
from tailreplay.cache import PrefixCache
from tailreplay.clock import clock_of
from tailreplay.engines.transformers import HybridLM
from tailreplay.engines.transformers.backbone import Backbone
from tailreplay.engines.transformers.devices import usable_device
from tailreplay.engines.transformers.results import GenerationResult
from tailreplay.storage import Storage

_GRAPHS = 8


class TransformersEngine:
    """A model in this process; see `ttft_turns.Engine`."""

    def __init__(self, target: Target, model: Backbone, plan: TtftPlan) -> None:
        device = usable_device(None)
        # What is timed is a tail from zero states: with an anchor nearby there would be less to replay.
        cache = PrefixCache(needs_of(model, target.engine, plan).pages, storage=Storage(anchor_bytes=0))
        self._lm = _load(target, plan, cache, device)
        self._lm.clock = clock_of(device)
        self.bandwidth = copy_bandwidth(device)
        self.costs = self._lm.backbone.costs
        self.vocabulary = int(self._lm.model.get_input_embeddings().num_embeddings)
        self.flags: dict[str, Any] = {
            "prefill_chunk": self._lm.prefill_chunk,
            "attention": str(getattr(self._lm.model.config, "_attn_implementation", "")),
            "phases": "CUDA events" if device.type == "cuda" else "host clock",
            "copies": "beside replay" if device.type == "cuda" else "in line",
            "cuda_graphs": graphs_of(plan) if device.type == "cuda" else 0,
        }

    def store(self, ids: list[int]) -> None:
        self._lm.cache.clear()
        self._lm.generate(ids, max_new_tokens=1, replay="off")

    def cold(self, ids: list[int]) -> Sample:
        self._lm.clock.settle()
        return Sample(self._lm.generate(ids, max_new_tokens=1, replay="off", store=False).timings.first_token)

    def hit(self, ids: list[int], ratio: float, ablation: Ablation) -> Sample:
        self._lm.ablation = ablation
        self._lm.clock.settle()
        return _sample(self._lm.generate(ids, max_new_tokens=1, replay=ratio, store=False))

    def close(self) -> None:
        """Let go of the model."""
        del self._lm


def graphs_of(plan: TtftPlan) -> int:
    """Return how many CUDA graphs of replays to keep: none if ablations are compared, since only some of them have any."""
    return _GRAPHS if set(plan.ablations) <= {"both"} else 0


def _load(target: Target, plan: TtftPlan, cache: PrefixCache, device: torch.device) -> HybridLM:
    from tailreplay.bench.shapes import random_model

    dtype, graphs = getattr(torch, plan.dtype), graphs_of(plan)
    if target.is_shape:
        return HybridLM(random_model(target.source, dtype, device=device), cache=cache, cuda_graphs=graphs)
    return HybridLM.from_pretrained(target.source, cache=cache, dtype=dtype, device=device, cuda_graphs=graphs)


def _sample(result: GenerationResult) -> Sample:
    times = result.timings
    return Sample(
        total=times.first_token,
        lookup=times.lookup,
        copy=times.copy,
        replay=times.replay,
        query=times.prefill,
        matched=result.reuse.matched,
        replayed=result.reuse.replayed,
    )
