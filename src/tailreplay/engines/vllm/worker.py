"""The worker's side: owns the bytes, obeys the scheduler's orders, replays tails between forwards."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch

from tailreplay.engines.vllm import compat
from tailreplay.engines.vllm.compat import Geometry
from tailreplay.engines.vllm.held import HeldHiddens
from tailreplay.engines.vllm.messages import Load, Put, Rows, StepMetadata, StepReport
from tailreplay.engines.vllm.plugin import TappedModel
from tailreplay.engines.vllm.replay import Tail, replay
from tailreplay.engines.vllm.settings import Settings
from tailreplay.pages import PageLayout, PartSpec
from tailreplay.tiers.host import HostArena

log = logging.getLogger("vllm.tailreplay")


@dataclass
class _Job:
    """A load under way: `done` tokens of its tail are replayed."""

    load: Load
    copied: bool = False
    done: int = 0


class WorkerSide:
    """Obeys one `StepMetadata` a step. One thread.

    Parameters
    ----------
    caches : dict
        vLLM's cache tensors by layer name.
    states : compat.StateBatch
        Runs recurrent layers outside vLLM's forward.
    """

    def __init__(
        self,
        settings: Settings,
        geometry: Geometry,
        model: TappedModel,
        caches: dict[str, torch.Tensor],
        states: compat.StateBatch,
        blocks: int,
    ) -> None:
        self._geometry = geometry
        self._model = model
        self._states = states
        self._budget = settings.max_replay_tokens_per_step
        self._keys_values = [_by_block(caches[name], blocks) for name in geometry.attention_layers]
        self._layout = _layout(geometry, self._keys_values)
        slots = settings.host_bytes // geometry.page_bytes
        device = self._keys_values[0].device
        self._arena = HostArena(self._layout, slots, pin=device.type == "cuda")
        self._device = device
        self._held: dict[str, HeldHiddens] = {}
        self._jobs: list[_Job] = []
        self._slots: torch.Tensor | None = None
        self._report = StepReport()
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self._failed: set[str] = set()

    # ---- a step, in the order in which vLLM calls

    def begin(self, context: compat.ForwardContext, meta: StepMetadata) -> None:
        """Take new loads and go on with those under way. Runs after the step's forward, as every load is asynchronous."""
        self._slots = compat.slot_mapping(context, self._geometry.attention_layers[0])
        self._jobs += [_Job(load) for load in meta.loads]

    def end(self, meta: StepMetadata) -> None:
        """Collect this step's hiddens, store its pages, then replay."""
        self._collect(meta.rows)
        broken: set[str] = set()
        for put in meta.puts:
            if put.request not in broken and self._put(put):
                self._report.stored.add(put.tag)
            else:
                # What follows a page that is missing could never be matched.
                broken.add(put.request)
                self._report.failed.add(put.tag)
        self._sent.update(meta.finals)
        for request in meta.forgets:
            self._held.pop(request, None)
        self._slots = None
        if self._jobs:
            self._work()

    def take_report(self) -> StepReport:
        """Return what became of this step's orders, once."""
        report, self._report = self._report, StepReport()
        return report

    def take_finished(self) -> tuple[set[str], set[str], set[str]]:
        """Return requests whose blocks are free to go, whose loads have ended, and which of those failed; once."""
        taken = self._sent, self._received, self._failed
        self._sent, self._received, self._failed = set(), set(), set()
        return taken

    # ---- storing

    def _collect(self, rows: list[Rows]) -> None:
        if not rows or self._slots is None:
            return
        slots = self._slots.tolist()
        row_of = {row.first_slot: row for row in rows}
        for index, slot in enumerate(slots):
            row = row_of.pop(slot, None)
            if row is None:
                continue
            held = self._held.get(row.request)
            if held is None:
                held = self._held[row.request] = HeldHiddens(len(self._model.taps), row.start)
            try:
                held.add(row.start, [tap[index : index + row.count] for tap in self._model.taps])
            except ValueError as error:
                log.warning("Not storing more of a request: %s.", error)
            if not row_of:
                return

    def _put(self, put: Put) -> bool:
        try:
            hiddens = self._held[put.request].take(put.start, put.count)
            for (part,), cache in zip(self._layout.kv, self._keys_values, strict=True):
                self._arena.write(part, [put.slot], cache[put.block].view(self._geometry.block_size, *part.shape))
            for part, rows in zip(self._layout.hidden, hiddens, strict=True):
                self._arena.write(part, [put.slot], rows)
        except Exception:
            log.exception("Storing a page failed.")
            return False
        return True

    # ---- loading

    def _work(self) -> None:
        """Copy and replay, at most `_budget` tokens in all; what is left goes on in the next step."""
        begin = time.perf_counter()
        for job in list(self._jobs):
            if not job.copied:
                self._try_to_copy(job)
        copied = time.perf_counter()
        self._report.load_seconds += copied - begin
        budget, batch = self._budget, []
        for job in self._jobs:
            count = min(job.load.tail - job.done, budget)
            if count > 0:
                batch.append(Tail(job.load, job.done, count))
                budget -= count
        if batch:
            try:
                replay(self._model, self._states, batch, self._read_hidden, self._device)
            except Exception:
                # The batch is lost as a whole: its states are half written.
                log.exception("Replaying failed.")
                lost = {tail.load.request for tail in batch}
                for job in [job for job in self._jobs if job.load.request in lost]:
                    self._end(job, failed=True)
            else:
                done = {tail.load.request: tail.done + tail.count for tail in batch}
                for job in self._jobs:
                    job.done = done.get(job.load.request, job.done)
        for job in [job for job in self._jobs if job.copied and job.done >= job.load.tail]:
            self._end(job, failed=False)
        self._report.replay_seconds += time.perf_counter() - copied

    def _try_to_copy(self, job: _Job) -> None:
        try:
            self._copy(job)
        except Exception:
            log.exception("Loading a page failed.")
            self._end(job, failed=True)

    def _copy(self, job: _Job) -> None:
        """Copy a load's pages into its attention blocks, and hold the hiddens of its last, partial page again."""
        load, size = job.load, self._geometry.block_size
        for (part,), cache in zip(self._layout.kv, self._keys_values, strict=True):
            for slot, block in zip(load.slots, load.blocks, strict=True):
                # Whole blocks: what lies past the match is never attended before it is written.
                self._arena.read(part, [slot], 0, size, cache[block].view(size, *part.shape))
        if load.tail == 0:
            self._states.zero(load.states)
        start = load.matched // size * size
        held = self._held[load.request] = HeldHiddens(len(self._model.taps), start)
        if start < load.matched:
            held.add(
                start,
                [self._read_hidden(load, group, start, load.matched) for group in range(len(self._layout.hidden))],
            )
        job.copied = True

    def _end(self, job: _Job, failed: bool) -> None:
        self._jobs = [other for other in self._jobs if other is not job]
        self._received.add(job.load.request)
        if failed:
            self._failed.add(job.load.request)
            self._held.pop(job.load.request, None)

    def _read_hidden(self, load: Load, group: int, start: int, stop: int) -> torch.Tensor:
        part = self._layout.hidden[group]
        out = torch.empty((stop - start, *part.shape), dtype=part.dtype, device=self._device)
        self._arena.read(part, load.slots, start, stop, out)
        return out


def _by_block(cache: torch.Tensor, blocks: int) -> torch.Tensor:
    """View a layer's cache with one row a block: kernels may cut a block into several of their own."""
    per_block = cache.shape[0] // blocks
    return cache if per_block == 1 else cache.view(blocks, per_block, *cache.shape[1:])


def _layout(geometry: Geometry, caches: list[torch.Tensor]) -> PageLayout:
    """Keys and values as they lie in a block, which only the kernels understand; hiddens token by token."""
    kv = tuple(
        (PartSpec(f"kv:{name}", (cache[0].numel() // geometry.block_size,), cache.dtype),)
        for name, cache in zip(geometry.attention_layers, caches, strict=True)
    )
    hidden = tuple(
        PartSpec(f"h{group.index}", (geometry.d_model,), geometry.dtype) for group in geometry.topology.stored_groups
    )
    return PageLayout(geometry.block_size, kv, hidden)
