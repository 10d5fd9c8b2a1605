"""The limits of a model, from its config alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tailreplay.bench.ttft_needs import needs_of
from tailreplay.bench.ttft_plan import Target, TtftPlan
from tailreplay.budget import Ratio

if TYPE_CHECKING:
    from tailreplay.engines.transformers.backbone import Backbone


def limits_of(target: Target, model: Backbone, plan: TtftPlan) -> dict[str, Any]:
    """Return bytes of a model and, by length and ratio, operations and bytes of a full prefill and of a hit."""
    costs, topology = model.costs, model.topology
    needs = needs_of(model, target.engine, plan)
    rows = []
    for length in plan.lengths:
        for ratio in plan.ratios:
            tails = [Ratio(ratio).tail(length, group) for group in topology.groups]
            full = costs.prefill_flops(0, length + plan.query)
            hit = costs.hit_flops(length, length + plan.query, tails)
            rows.append(
                {
                    "model": target.name,
                    "length": length,
                    "query": plan.query,
                    "ratio": ratio,
                    "replayed": max(tails, default=0),
                    "full_flops": full,
                    "hit_flops": hit,
                    "limit": full / hit,
                    "limit_without_skip": full / costs.hit_flops(length, length + plan.query, tails, skip=False),
                    "cached_bytes": length * costs.page_bytes_per_token,
                    "copy_bytes": length * costs.kv_bytes,
                    "loaded_bytes": costs.hit_bytes(length, tails),
                }
            )
    return {
        "model": target.name,
        "dtype": plan.dtype,
        "layers": len(topology.kinds),
        "attention_layers": len(topology.attention_layers),
        "max_tokens": model.max_tokens,
        "kv_bytes_per_token": costs.kv_bytes,
        "hidden_bytes_per_token": sum(costs.hidden_bytes),
        "state_bytes": costs.state_bytes,
        "weight_bytes": needs.weights,
        "needed_bytes": needs.total,
        "rows": rows,
    }
