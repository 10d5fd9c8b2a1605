"""The worker's side: owns the bytes, obeys the scheduler's orders, replays tails between forwards."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tailreplay.ablation import METHOD, Ablation
from tailreplay.clock import Clock, HostClock
from tailreplay.engines.vllm import compat
from tailreplay.engines.vllm.anchor_store import AnchorStore
from tailreplay.engines.vllm.capture import Capture
from tailreplay.engines.vllm.compat import Geometry, TensorRanks
from tailreplay.engines.vllm.mean import MeanKeeper
from tailreplay.engines.vllm.messages import Load, Put, Save, StepMetadata, StepReport
from tailreplay.engines.vllm.plugin import TappedModel
from tailreplay.engines.vllm.replay import Tail, replay
from tailreplay.engines.vllm.settings import Settings
from tailreplay.engines.vllm.store import PageStore
from tailreplay.errors import CacheConfigError
from tailreplay.tiers.mover import Mover

log = logging.getLogger("vllm.tailreplay")


@dataclass
class _Job:
    """A load under way: `done` tokens of its tail are replayed."""

    load: Load
    copied: bool = False
    done: int = 0


class WorkerSide:
    """Obeys one `StepMetadata` a step. One thread. All ranks of a stage do the same things in the same order.

    Parameters
    ----------
    states : compat.StateBatch
        Runs recurrent layers outside vLLM's forward.
    mover : Mover, optional
        Moves pages to and from the tiers below host memory.

    Attributes
    ----------
    observer : callable or None
        For debugging: called with each load that has ended well, before anything else runs on its states.
    ablation : Ablation
        For benchmarks: what hits do without.
    clock : Clock
        Times copies and replays; benchmarks set one of the device.
    """

    def __init__(
        self,
        settings: Settings,
        geometry: Geometry,
        model: TappedModel,
        store: PageStore,
        states: compat.StateBatch,
        anchors: AnchorStore,
        ranks: TensorRanks,
        device: torch.device,
        mover: Mover | None = None,
    ) -> None:
        self._geometry = geometry
        self._model = model
        self.store = store
        self.capture = Capture(model.taps, store, ranks, geometry)
        self.states = states
        self.anchors = anchors
        self.means = MeanKeeper(states)
        self._ranks = ranks
        self._device = device
        self._mover = mover
        # Filled by the mover's threads.
        self._ended: queue.SimpleQueue[tuple[int, bool]] = queue.SimpleQueue()
        self._limit = settings.max_replay_tokens_per_step
        self.observer: Callable[[Load], None] | None = None
        self.ablation: Ablation = METHOD
        self.clock: Clock = HostClock()
        self._jobs: list[_Job] = []
        # Request -> the first hiddens of its tail, already on the device, until they have been replayed.
        self._staged: dict[str, torch.Tensor] = {}
        self._first_rows: dict[str, int] = {}
        self._report = StepReport()
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self._failed: set[str] = set()

    # ---- a step, in the order in which vLLM calls

    def begin(self, context: compat.ForwardContext, meta: StepMetadata, step: Mapping[str, Any]) -> None:
        """Take new loads. Runs after the step's forward, but before it if that forward needs one of them.

        Parameters
        ----------
        step : mapping
            What vLLM's model runner says of the step (see `compat.first_rows`).
        """
        if meta.page_size != self._geometry.page_size:
            raise CacheConfigError(
                f"vLLM's scheduler and worker chose different attention layouts (pages of {meta.page_size} and "
                f"{self._geometry.page_size} tokens): name one with --attention-backend."
            )
        self.means.drop(meta.void)
        slots = {row.request: row.first_slot for row in meta.rows}
        self._first_rows = compat.first_rows(context, self._geometry.attention_layers[0], slots, step)
        self._jobs += [_Job(load) for load in meta.loads]
        while any(job.load.waits for job in self._jobs):
            self._work(self._limit)  # the forward waits in any case

    def end(self, meta: StepMetadata) -> None:
        """Collect this step's hiddens, store its pages, then go on with the loads under way."""
        for request in meta.restarts:
            self.capture.forget(request)
        self.capture.collect(meta.rows, self._first_rows)
        self._move(meta)
        self._store(meta.puts)
        for save in meta.saves:
            self._save(save)
        self._sent.update(meta.finals)
        for request in meta.forgets:
            self.capture.forget(request)
        if self._jobs:
            self._work(meta.replay_tokens)
        self._report.decoding = meta.decoding

    def take_report(self) -> StepReport:
        """Return what became of this step's orders, once."""
        report, self._report = self._report, StepReport()
        report.mean = self.means.tag
        while not self._ended.empty():
            tag, good = self._ended.get()
            report.moved[tag] = 1, int(not good)
        return report

    def close(self) -> None:
        """Finish writing to the tiers below and end the threads."""
        if self._mover is not None:
            self._mover.close()

    def take_finished(self) -> tuple[set[str], set[str], set[str]]:
        """Return requests whose blocks are free to go, whose loads have ended, and which of those failed; once."""
        taken = self._sent, self._received, self._failed
        self._sent, self._received, self._failed = set(), set(), set()
        return taken

    # ---- tiers below

    def _move(self, meta: StepMetadata) -> None:
        if self._mover is not None:
            if meta.fetches:
                self._mover.fetch(meta.fetches, self._note)
            for spill in meta.spills:
                self._mover.spill(spill, self._note)

    def _note(self, tag: int, good: bool) -> None:
        """Note that a fetch or a spill has ended. On any thread."""
        self._ended.put((tag, good))

    def _store(self, puts: Sequence[Put]) -> None:
        """Store pages, report what became of them, and let good ones go on to the tiers below."""
        for put, good in self.capture.store(puts):
            (self._report.stored if good else self._report.failed).add(put.tag)
            if put.spill is None:
                continue
            if good and self._mover is not None:
                self._mover.spill(put.spill, self._note)
            else:
                self._note(put.spill.tag, False)

    def _save(self, save: Save, failed: bool = False) -> None:
        """Store states, unless what should have made them has failed, and report what became of it."""
        try:
            if not failed:
                self.anchors.save(save.slot, save.states)
        except Exception:
            log.exception("Saving states failed.")
            failed = True
        self._report.saved[save.tag] = 1, int(failed)

    # ---- loading

    def _work(self, budget: int) -> None:
        """Copy and replay, at most `budget` tokens in all; what is left goes on in the next step."""
        clock = self.clock
        begin = clock.mark()
        batch = self._next(budget)
        fresh = [job for job in self._jobs if not job.copied]
        self._copy(fresh, {tail.load.request: tail.count for tail in batch})
        # Without copies their stream has no moment of its own: it would be one before `begin`.
        copied = self.store.mark(clock) if fresh else begin
        if not self.ablation.overlap:
            self.store.wait()
        started = clock.mark()
        going_on = {job.load.request for job in self._jobs}
        batch = [tail for tail in batch if tail.load.request in going_on]
        if batch:
            self._replay(batch)
            self._report.replayed += sum(tail.count for tail in batch)
        self.store.wait()
        for job in [job for job in self._jobs if job.copied and job.done >= job.load.tail]:
            self._end(job, failed=False)
        replayed = clock.mark()
        self._report.load_seconds += clock.between(begin, copied)
        self._report.replay_seconds += clock.between(started, replayed)

    def _next(self, budget: int) -> list[Tail]:
        """Return what to replay next, `budget` tokens in all."""
        batch = []
        for job in self._jobs:
            count = self.means.piece(job.load, job.done, min(job.load.tail - job.done, budget))
            if count > 0:
                batch.append(Tail(job.load, job.done, count))
                budget -= count
        return batch

    def _copy(self, jobs: list[_Job], counts: Mapping[str, int]) -> None:
        """Begin loads. Only those that are fine on every rank go on: replay runs on all of them together.

        Parameters
        ----------
        counts : mapping
            Request -> tokens of its tail that are replayed right after.
        """
        fine = self._ranks.agree([self._try_to_copy(job, counts.get(job.load.request, 0)) for job in jobs])
        for job, good in zip(jobs, fine, strict=True):
            job.copied = good
            if not good:
                self._end(job, failed=True)

    def _try_to_copy(self, job: _Job, count: int) -> bool:
        load, page = job.load, self._geometry.page_size
        try:
            damaged = self.store.damaged(load)
            if damaged:
                log.warning("%d cached pages are not what was stored; the request is computed instead.", len(damaged))
                self._report.damaged |= damaged
                return False
            if load.anchor >= 0:
                if self.anchors.is_damaged(load.anchor):
                    log.warning("Saved states are not what was stored; the request is computed instead.")
                    self._report.damaged_anchors.add(load.anchor)
                    return False
                self.anchors.load(load.anchor, load.states)
            self.means.begin(load)
            # Before the keys and values, which would hold them up on their way to a GPU: replay begins with these.
            if count:
                first = load.matched - load.tail
                self._staged[load.request] = self.store.hidden_shares(load, first, first + count)
            self.store.fill(load)
            if load.tail == 0 and load.anchor < 0:
                self.states.zero(load.states)
            # The hiddens of the last, partial page are held again, since the request will fill that page.
            start = load.matched // page * page
            partial = start < load.matched and load.hidden_slots[-1] >= 0
            hiddens = self.store.hidden_shares(load, start, load.matched) if partial else None
            self.capture.hold(load.request, start, hiddens)
        except Exception:
            log.exception("Loading a page failed.")
            return False
        return True

    def _replay(self, batch: list[Tail]) -> None:
        try:
            replay(self._model, self.states, batch, self._hidden, self._device, self.ablation.skip)
        except Exception:
            if self._ranks.size > 1:
                raise  # the other ranks wait inside the same batch: nobody can go on
            # The batch is lost as a whole: its states are half written.
            log.exception("Replaying failed.")
            lost = {tail.load.request for tail in batch}
            for job in [job for job in self._jobs if job.load.request in lost]:
                self._end(job, failed=True)
            return
        finally:
            self._staged.clear()
        done = {tail.load.request: tail.done + tail.count for tail in batch}
        for job in [job for job in self._jobs if job.load.request in done]:
            job.done = done[job.load.request]
            self.means.replayed(job.load, job.done)

    def _hidden(self, load: Load, group: int, start: int, stop: int) -> torch.Tensor:
        """Return hiddens ``start .. stop-1`` of a stored group, ``(stop - start, d_model)``. All ranks call it alike."""
        staged = self._staged.get(load.request)
        if staged is None:
            return self.store.hidden(load, group, start, stop)
        return self._ranks.gather(staged[group])

    def _end(self, job: _Job, failed: bool) -> None:
        self._staged.pop(job.load.request, None)
        self._jobs = [other for other in self._jobs if other is not job]
        request = job.load.request
        self.means.ended(job.load, failed)
        if job.load.save is not None:
            self._save(job.load.save, failed)
        if failed:
            if job.load.waits:
                raise RuntimeError("A synchronous load failed, and the forward that needs it cannot be taken back.")
            self._failed.add(request)
            self.capture.forget(request)
        elif self.observer is not None:
            self.observer(job.load)
        if job.load.waits:
            self._report.loaded.add(request)
        else:
            self._received.add(request)
