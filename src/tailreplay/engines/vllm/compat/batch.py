"""Where each request's tokens are in the batch that vLLM runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.forward_context import ForwardContext


def first_rows(
    context: ForwardContext, layer: str, first_slots: Mapping[str, int], step: Mapping[str, Any]
) -> dict[str, int]:
    """Return the batch row of the first token of each request; nothing in a step without a forward.

    Parameters
    ----------
    layer : str
        Name of an attention layer.
    first_slots : mapping
        Request -> physical cache slot of its first token in this step.
    step : mapping
        Keyword arguments of `start_load_kv`. The newer model runner names the batch's requests in order there; the older
        one says nothing, and on a GPU its slots must be waited for.
    """
    if "request_ids" in step and "scheduler_output" in step:
        counts = step["scheduler_output"].num_scheduled_tokens
        rows, at = {}, 0
        for request in step["request_ids"]:
            rows[request] = at
            at += counts[request]
        return {request: rows[request] for request in first_slots if request in rows}
    mapping = context.slot_mapping
    slots = mapping.get(layer) if isinstance(mapping, dict) else None
    if slots is None or not first_slots:
        return {}
    wanted = {slot: request for request, slot in first_slots.items()}
    return {wanted[slot]: row for row, slot in enumerate(slots.tolist()) if slot in wanted}
