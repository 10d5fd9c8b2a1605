"""Which requests may share pages."""

from __future__ import annotations

from typing import Any

from tailreplay.engines.vllm.compat import Geometry
from tailreplay.keys import Namespace
from tailreplay.plan import ReplayPlan
from tailreplay.topology import Topology


def namespace_of(request: Any, model: str, geometry: Geometry) -> Namespace:
    """Return the namespace of a request of vLLM's: its salt, adapter and images, beside the engine's model and layout.

    Parameters
    ----------
    model : str
        All of the engine's configuration that cached numbers depend on.
    """
    lora = request.lora_request
    adapter = f"{lora.lora_name}:{lora.lora_int_id}:{lora.lora_path}" if lora is not None else ""
    # An image is its content's hash and its place: the prompt holds the same placeholder tokens for all of them.
    images = tuple(f"{feature.identifier}@{feature.mm_position.offset}" for feature in request.mm_features)
    return Namespace(
        model, repr(geometry), geometry.page_size, request.cache_salt or "", adapter=adapter, images=images
    )


def meets_images(request: Any, plan: ReplayPlan, topology: Topology) -> bool:
    """Whether a replay would run the layers before the first attention layer on images, as their placeholders.

    All other groups begin from stored hiddens, which know of the images.
    """
    if not any(tail and not group.stores_hidden for tail, group in zip(plan.tails, topology.groups, strict=True)):
        return False
    start = plan.matched - plan.replayed
    places = [feature.mm_position for feature in request.mm_features]
    return any(place.offset < plan.matched and place.offset + place.length > start for place in places)
