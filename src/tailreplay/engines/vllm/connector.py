"""The KV connector that vLLM loads: hands each call to the scheduler's or the worker's side."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from tailreplay.ablation import Ablation
from tailreplay.clock import Clock
from tailreplay.engines.vllm import compat
from tailreplay.engines.vllm.anchor_store import AnchorStore
from tailreplay.engines.vllm.anchoring import warn_of_chunks
from tailreplay.engines.vllm.messages import StepMetadata, StepReport
from tailreplay.engines.vllm.plugin import tapped_model
from tailreplay.engines.vllm.scheduler import SchedulerSide
from tailreplay.engines.vllm.settings import parse_settings
from tailreplay.engines.vllm.stats import TailReplayPromMetrics, TailReplayStats
from tailreplay.engines.vllm.store import PageStore
from tailreplay.engines.vllm.worker import WorkerSide
from tailreplay.errors import CacheConfigError
from tailreplay.events import PageEvents
from tailreplay.tiers.mover import Mover
from tailreplay.tiers.packing import Packer


class TailReplayConnector(compat.KVConnectorBase_V1, compat.SupportsHMA):  # type: ignore[misc]
    """Token-level prefix reuse for hybrid models; see ``docs/vllm.md`` for its settings."""

    def __init__(
        self, vllm_config: compat.VllmConfig, role: compat.KVConnectorRole, kv_cache_config: compat.KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._settings = parse_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._geometry = compat.geometry(vllm_config, kv_cache_config)
        if self._geometry.aligned_states and not self._settings.async_loads:
            # vLLM publishes the blocks of a synchronous load before the connector hears of them.
            raise CacheConfigError(
                "The connector setting async_loads: false needs vLLM's own prefix caching off: start with "
                "--no-enable-prefix-caching."
            )
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._events = PageEvents() if compat.publishes_events(vllm_config) else None
        if role is compat.KVConnectorRole.SCHEDULER:
            storage = self._settings.storage
            warn_of_chunks(self._settings.anchor_interval, vllm_config.scheduler_config.max_num_batched_tokens)
            model = compat.fingerprint(vllm_config, outlasts=bool(storage.tiers))
            self._scheduler = SchedulerSide(
                self._settings, self._geometry, model, self._events, storage.open(lends=False)
            )

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

    # ---- scheduler

    def on_new_request(self, request: Any) -> None:
        self._scheduling.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduling.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduling.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        return self._scheduling.step(scheduler_output, self._kv_cache_manager.get_block_ids)

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduling.update(
            connector_output.kv_connector_worker_meta,
            connector_output.finished_recving or (),
            connector_output.failed_recving or (),
        )

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduling.finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_orders

    def take_events(self) -> Iterable[compat.KVCacheEvent]:
        return compat.kv_events(self._events.take()) if self._events is not None and len(self._events) else ()

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        # A load fills its last block in part: vLLM must clear what lies past it, as it does for blocks that nobody loads.
        return ()

    def reset_cache(self) -> bool:
        self._scheduling.reset()
        return True

    def get_kv_connector_stats(self) -> TailReplayStats | None:
        return TailReplayStats(self._scheduler.take_stats()) if self._scheduler is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TailReplayStats:
        return TailReplayStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> TailReplayPromMetrics:
        return TailReplayPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        device = kv_caches[self._geometry.attention_layers[0]].device
        ranks = compat.TensorRanks.current()
        blocks = self._kv_cache_config.num_blocks
        store = PageStore(self._settings, self._geometry, ranks, kv_caches, blocks)
        states = compat.StateBatch(self._vllm_config, self._kv_cache_config, self._geometry, device)
        anchors = AnchorStore(self._settings, self._geometry, states, pin=device.type == "cuda")
        mover = self._mover(store, self._geometry.rank_name(ranks.rank))
        self._worker = WorkerSide(
            self._settings, self._geometry, tapped_model(), store, states, anchors, ranks, device, mover
        )

    def start_load_kv(self, forward_context: compat.ForwardContext, **kwargs: Any) -> None:
        self._working.begin(forward_context, self._step, kwargs)

    def wait_for_save(self) -> None:
        self._working.end(self._step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> compat.KVConnectorTransferResults:
        sent, received, failed = self._working.take_finished()
        return compat.KVConnectorTransferResults(sent, received, failed)

    def build_connector_worker_meta(self) -> StepReport:
        return self._working.take_report()

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        return

    # ---- benchmarks

    def carry_out(self, ablation: Ablation, clock: Clock) -> None:
        """Let this rank's hits do without something, and be timed by `clock`."""
        self._working.ablation, self._working.clock = ablation, clock

    def spent(self) -> tuple[float, float]:
        """Return the seconds of copies and replays since the start; in the scheduler's process."""
        counts = self._scheduling.counts
        return counts["load_seconds"], counts["replay_seconds"]

    # ---- inside

    def _mover(self, store: PageStore, rank: str) -> Mover | None:
        """Return what moves this rank's pages to and from the tiers below host memory."""
        storage = self._settings.storage
        if not storage.tiers:
            return None
        label = self._vllm_config.model_config.model
        packer = Packer(store.arena, storage.hidden_codec, storage.kv_codec, rank, label)
        return Mover(packer, storage.open(), seal=self._settings.checksums)

    @property
    def _step(self) -> StepMetadata:
        step = self._get_connector_metadata()
        assert isinstance(step, StepMetadata)
        return step

    @property
    def _scheduling(self) -> SchedulerSide:
        assert self._scheduler is not None, "called in a worker"
        return self._scheduler

    @property
    def _working(self) -> WorkerSide:
        assert self._worker is not None, "called before the caches were registered"
        return self._worker
