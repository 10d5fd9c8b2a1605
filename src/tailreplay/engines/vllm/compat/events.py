"""vLLM's events for cache-aware routers."""

from __future__ import annotations

import re
from collections.abc import Iterable

from vllm.config import VllmConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent

from tailreplay.events import PageRemoved, PageStored
from tailreplay.keys import TOKEN_BYTES

_MEDIUM = "CPU"


def publishes_events(config: VllmConfig) -> bool:
    """Whether this engine tells routers what its caches hold."""
    events = config.kv_events_config
    return events is not None and events.enable_kv_cache_events


def kv_events(changes: Iterable[PageStored | PageRemoved]) -> list[KVCacheEvent]:
    """Return vLLM's events for changes of the catalog: one page is one block."""
    return [
        _block_stored(change) if isinstance(change, PageStored) else BlockRemoved([change.key], _MEDIUM)
        for change in changes
    ]


def _block_stored(page: PageStored) -> BlockStored:
    tokens = [int.from_bytes(page.ids[at : at + TOKEN_BYTES], "big") for at in range(0, len(page.ids), TOKEN_BYTES)]
    space = page.namespace
    # See `namespaces.namespace_of`: name, number and path of the adapter.
    adapter = re.match(r"(.+?):(\d+):", space.adapter)
    extra = tuple(filter(None, [adapter and adapter[1], *space.images, space.salt]))
    return BlockStored(
        block_hashes=[page.key],
        parent_block_hash=page.parent,
        token_ids=tokens,
        block_size=len(tokens),
        lora_id=int(adapter[2]) if adapter else None,
        medium=_MEDIUM,
        lora_name=adapter[1] if adapter else None,
        extra_keys=[extra or None],
    )
