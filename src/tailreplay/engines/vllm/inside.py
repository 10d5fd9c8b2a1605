"""An engine that runs in this process, seen from inside: for benchmarks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from tailreplay.ablation import Ablation
from tailreplay.clock import Clock


@dataclass(frozen=True)
class Spent:
    """Seconds since the engine's start, of all requests together."""

    lookup: float
    copy: float
    replay: float

    def since(self, before: Spent) -> Spent:
        """Return what was spent after `before`."""
        return Spent(self.lookup - before.lookup, self.copy - before.copy, self.replay - before.replay)


class Inside:
    """The connector's two sides in a `vllm.LLM`.

    Parameters
    ----------
    llm : vllm.LLM
        Started with ``VLLM_ENABLE_V1_MULTIPROCESSING=0``. Its connector is timed from now on.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
        self._lookup = 0.0
        self._matching = self._connector.get_num_new_matched_tokens
        self._connector.get_num_new_matched_tokens = self._match

    def set(self, ablation: Ablation, clock: Clock) -> None:
        """Let hits be carried out, and timed, in this way on every rank."""
        self._llm.collective_rpc(_set, args=(ablation, clock))

    def spent(self) -> Spent:
        """Return the time spent so far. Complete for requests that have been answered."""
        return Spent(self._lookup, *self._connector.spent())

    def close(self) -> None:
        """End the engine, so that another one can start in this process."""
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        del self._llm, self._connector, self._matching
        cleanup_dist_env_and_memory()

    def _match(self, request: Any, computed: int) -> Any:
        begin = time.perf_counter()
        try:
            return self._matching(request, computed)
        finally:
            self._lookup += time.perf_counter() - begin


def _set(_: Any, ablation: Ablation, clock: Clock) -> None:
    """Runs in each worker."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    get_kv_transfer_group().carry_out(ablation, clock)
