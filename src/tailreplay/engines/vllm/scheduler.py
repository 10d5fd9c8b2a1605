"""The scheduler's side: owns the catalog and decides what is matched, loaded, stored and evicted."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from tailreplay.codecs import codec_of
from tailreplay.engines.vllm import compat
from tailreplay.engines.vllm.anchoring import AnchorWriter
from tailreplay.engines.vllm.compat import Geometry
from tailreplay.engines.vllm.lookup import Lookup
from tailreplay.engines.vllm.lower import LowerSide
from tailreplay.engines.vllm.mean import MeanOrders
from tailreplay.engines.vllm.messages import Load, Put, Rows, Save, StepMetadata, StepReport
from tailreplay.engines.vllm.namespaces import namespace_of
from tailreplay.engines.vllm.options import Options
from tailreplay.engines.vllm.pacing import Pacer
from tailreplay.engines.vllm.reports import Tally, report_of
from tailreplay.engines.vllm.settings import Settings
from tailreplay.engines.vllm.storing import PageWriter
from tailreplay.engines.vllm.tracked import Tracked, load_of
from tailreplay.events import PageEvents
from tailreplay.keys import token_bytes
from tailreplay.pages import state_codec
from tailreplay.plan import ReplayPlan, without_reuse
from tailreplay.tiers.base import Tier

log = logging.getLogger("vllm.tailreplay")


class SchedulerSide:
    """Answers vLLM's scheduler. One thread, no tensors.

    Parameters
    ----------
    model : str
        All of the engine's configuration that cached numbers depend on.
    events : PageEvents, optional
        Is told what the catalog gets and loses.
    tiers : sequence of Tier
        Below host memory, fastest first; the workers open their own.
    """

    def __init__(
        self,
        settings: Settings,
        geometry: Geometry,
        model: str,
        events: PageEvents | None = None,
        tiers: Sequence[Tier] = (),
    ) -> None:
        self._settings = settings
        self._geometry = geometry
        self._model = model
        self._page_size = geometry.page_size
        self.limit_bytes = settings.host_bytes
        codec = settings.storage.anchor_codec
        self.anchor_bytes = geometry.anchor_bytes(codec)
        self.catalog = settings.storage.catalog(
            self._page_size,
            settings.host_bytes,
            *geometry.page_bytes(settings.host_codec),
            events,
            anchor_bytes=self.anchor_bytes,
        )
        self._requests: dict[str, Tracked] = {}
        self._loads: list[Load] = []
        self._finals: list[tuple[Tracked, list[Put], list[Save]]] = []
        # Requests that have ended and whose last pages are not confirmed yet.
        self._landing: dict[str, Tracked] = {}
        self._restarts: list[str] = []
        self._forgets: list[str] = []
        self._epoch = ""
        self.tally = Tally()
        self.counts = self.tally.counts
        self._asked = Options(settings, self.counts)
        self._pacer = Pacer(settings.decode_slowdown, settings.max_replay_tokens_per_step)
        lossy = codec_of(settings.host_codec).lossy
        self._lower = (
            LowerSide(self.catalog, geometry.whole, geometry.ranks, tiers, self.counts, lossy) if tiers else None
        )
        self._lookup = Lookup(self.catalog, settings, geometry, self._lower)
        self._writer = PageWriter(
            self.catalog, geometry.block_size, settings.min_match, self.counts, self._lower, lossy
        )
        lossy = any(codec_of(state_codec(part, codec)).lossy for part in geometry.state_parts)
        self._means = MeanOrders()
        self._saver = AnchorWriter(self.catalog, len(geometry.ranks), lossy, settings.anchor_interval)

    # ---- look-up

    def arrived(self, request: Any) -> None:
        """Begin to bring up what lower tiers hold of a request's prompt, while earlier requests are still running."""
        self._lookup.begin(self._track(request))

    def match(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Return how many tokens past `computed` can be loaded, and that loads are asynchronous.

        None asks vLLM to come back in the next step: more of the prefix is on its way.
        """
        tracked = self._track(request)
        tracked.first_asked = tracked.first_asked or time.monotonic()
        self._release_plan(tracked)
        if tracked.load_failed:
            return 0, False  # what failed once would fail again: computed this time
        plan = self._lookup.plan(tracked, computed, [*self._requests.values(), *self._landing.values()])
        if plan is None:
            return None, False
        tracked.report = None
        tracked.present = computed
        self._set_plan(tracked, plan)
        extra = plan.matched - computed
        return (extra, self._settings.async_loads) if extra > 0 else (0, False)

    def allocated(self, request: Any, blocks: tuple[list[int], ...], external: int) -> None:
        """Note the blocks that vLLM gave a request; begin the load if there is one."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.loading:
            return
        tracked.in_flight = True
        plan = tracked.plan
        if external > 0 and plan is not None:
            tracked.loading = True
            load = load_of(tracked, plan, blocks, self._geometry, not self._settings.async_loads)
            self._writer.open(tracked, plan)
            if tracked.options.calibrates:
                load = replace(load, calibrates=self._means.order(plan))
            elif plan.worth_saving:
                # A second request ends its match here: a third may.
                load = replace(load, save=self._saver.order(tracked, plan.matched, load.states))
            self._loads.append(load)
            if self._geometry.aligned_states and not plan.exact:
                # Else vLLM's own prefix cache would hand what follows to everybody as exact.
                compat.isolate(request)
                tracked.isolated = True
            if not self._settings.async_loads:
                self._report(tracked, plan)
        elif tracked.page is None and tracked.report is None:
            miss = plan
            if plan is not None and plan.matched > tracked.present:
                miss = without_reuse(plan, "not_loaded")
            self._release_plan(tracked)
            self._report(tracked, miss)
            self._writer.open(tracked, miss)

    # ---- a step

    def step(self, output: Any, blocks_of: Any) -> StepMetadata:
        """Return the orders for the step that `output` schedules.

        Parameters
        ----------
        blocks_of : callable
            ``blocks_of(request_id)`` returns the request's blocks by KV cache group.
        """
        meta = StepMetadata(self._page_size, loads=self._loads, void=self._means.void)
        decodes = prefills = 0
        self._loads = []
        if self._lower is not None:
            self._lower.advance()
            meta.fetches, meta.spills = self._lower.take_orders()
        self._flush_finals(meta)
        scheduled = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        cached = output.scheduled_cached_reqs
        scheduled += list(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request in set(output.preempted_req_ids or ()) - {name for name, _ in scheduled}:
            self._drop(request)
        meta.restarts += self._restarts
        self._restarts = []
        for request, start in scheduled:
            tracked = self._requests.get(request)
            if tracked is None:
                continue
            if start > tracked.computed and tracked.page is not None:
                self.counts["refused:gap"] += 1  # vLLM's own cache has tokens whose hiddens were never seen
                self._writer.stop(tracked)
            count = output.num_scheduled_tokens[request]
            tracked.computed = start + count
            if start < tracked.request.num_prompt_tokens:
                prefills += 1
            else:
                decodes += 1
            if tracked.page is None:
                continue
            blocks = blocks_of(request)
            attention = blocks[self._geometry.attention_group]
            size = self._geometry.block_size
            meta.rows.append(Rows(request, start, count, attention[start // size] * size + start % size))
            self._writer.seal(tracked, attention, meta.puts)
            if start < tracked.request.num_prompt_tokens and self._saver.is_due(tracked):
                meta.saves += self._saves(tracked, tracked.computed, blocks)
        meta.forgets += [*self._forgets, *sorted(self._writer.take_stopped())]
        self._forgets = []
        meta.replay_tokens = self._pacer.budget(decoding=decodes > 0)
        meta.decoding = decodes > 0 and not prefills
        return meta

    def update(self, report: StepReport | None, received: Iterable[str], failed: Iterable[str]) -> None:
        """Take the worker's report of a step: pages that can be matched now, loads that have ended."""
        if report is not None:
            self._pacer.step(time.monotonic(), report.decoding, report.replayed)
            landed = [self._writer.stored(tag) for tag in sorted(report.stored)]
            landed += [self._writer.failed(tag) for tag in sorted(report.failed, reverse=True)]
            for done in filter(None, landed):
                self._landing.pop(done.request.request_id, None)
            if self._lower is not None:
                for tag, page in self._lower.moved(report.moved):
                    self._writer.spilled(tag, page)
            if report.load_seconds or report.replay_seconds:
                self.counts["load_seconds"] += report.load_seconds
                self.counts["replay_seconds"] += report.replay_seconds
            self._saver.ended(report.saved)
            self.counts["calibrations"] += self._means.heard(report.mean)
            self._lookup.has_mean = self._means.known > 0
            self._condemn(report.damaged, report.damaged_anchors)
            for request in report.loaded:
                self._loaded(request)
        failures = set(failed)
        for request in received:
            tracked = self._requests.get(request)
            if tracked is None:
                continue
            plan = tracked.plan
            if request in failures and plan is not None:
                log.warning("Loading %d cached tokens failed; the request is computed instead.", plan.matched)
                plan = without_reuse(plan, "load_failed")
                tracked.load_failed = True
                self._restarts.append(request)  # other ranks may have loaded it well
                self._writer.open(tracked, plan)
            self._report(tracked, plan)
            self._loaded(request)

    def finished(self, request: Any, blocks: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """Store what is left of a request that has ended. True keeps its blocks until the worker has copied them."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return False, None
        tracked.in_flight = False
        answer = {"tailreplay": tracked.report} if tracked.report is not None else None
        # Streams and answers that end at a stop string do not carry transfer parameters: the log has it for every request.
        log.info("request %s: %s", request.request_id, tracked.report)
        if tracked.loading:
            return False, answer  # vLLM waits for the load; it is forgotten when that has ended
        puts: list[Put] = []
        saves: list[Save] = []
        if tracked.page is not None:
            # Steps under way may have taken states past the last token: then nobody knows what they stand for.
            seen = request.num_computed_tokens if request.num_computed_tokens == tracked.computed else -1
            # The last sampled token was never computed, unless the step after it was under way.
            tracked.computed = min(request.num_computed_tokens, request.num_tokens)
            tracked.expected = token_bytes(list(request.all_token_ids)[: tracked.computed])
            attention = blocks[self._geometry.attention_group]
            self._writer.seal(tracked, attention, puts)
            self._writer.put_rest(tracked, attention, puts)
            saves = self._saves(tracked, seen, blocks)
        if not puts and not saves:
            self._forget(tracked)
            return False, answer
        self._finals.append((tracked, puts, saves))
        self._writer.close(tracked)
        if puts:
            self._landing[request.request_id] = tracked
        return True, answer

    def reset(self) -> None:
        """Match nothing of what is stored or on its way: the weights may have changed."""
        # Never a name that was there before: what lower tiers hold outlasts this process.
        self._epoch = f"#{secrets.token_hex(8)}"
        for tracked in self._requests.values():
            self._writer.stop(tracked)
            tracked.namespace = replace(tracked.namespace, model=self._model_now)
        self.catalog.clear()
        self._means.reset()
        self._lookup.has_mean = False

    def loading(self, request: str) -> tuple[list[int], ReplayPlan | None]:
        """Return a request's tokens so far and the plan that its load follows now. For checks."""
        tracked = self._requests[request]
        return list(tracked.request.all_token_ids), tracked.plan

    @property
    def has_orders(self) -> bool:
        """Whether workers have something to do though no request runs: the last pages are to be written."""
        return self._lower is not None and self._lower.has_orders

    def close(self) -> None:
        """Let go of the tiers below."""
        if self._lower is not None:
            self._lower.close()

    def take_stats(self) -> dict[str, Any]:
        """Return the counts since the last call, and the sizes now; empty if nothing happened."""
        return self.tally.take(self.catalog, self._settings.host_bytes, self.anchor_bytes, self._lookup.has_mean)

    # ---- inside: requests

    def _saves(self, tracked: Tracked, position: int, blocks: tuple[list[int], ...]) -> list[Save]:
        """Return the order to save a request's states after `position` tokens, which are in its blocks; or nothing."""
        if position <= 0 or tracked.options.calibrates or not self.catalog.anchors.slots:
            return []
        save = self._saver.order(tracked, position, self._geometry.state_blocks(blocks, position))
        return [save] if save is not None else []

    def _condemn(self, slots: set[int], anchor_slots: set[int]) -> None:
        """Let what has wrong bytes not be matched again. The loads that met it still pin it."""
        if not slots and not anchor_slots:
            return
        plans = [tracked.plan for tracked in self._requests.values() if tracked.plan is not None]
        for anchor in {plan.anchor for plan in plans if plan.anchor is not None and plan.anchor.slot in anchor_slots}:
            self.counts["damaged_anchors"] += 1
            self.catalog.anchors.drop(anchor)
        pages = {page.slot: page for plan in plans for page in plan.pages}
        for slot in sorted(slots & set(pages)):
            self.counts["damaged_pages"] += 1
            self.catalog.condemn(pages[slot])

    def _track(self, request: Any) -> Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            options = self._asked.of(request)
            prompt = token_bytes(list(request.all_token_ids)[: request.num_prompt_tokens])
            namespace = namespace_of(request, self._model_now, self._geometry)
            tracked = Tracked(request, namespace, options, expected=prompt)
            if options.calibrates and self._geometry.aligned_states:
                compat.isolate(request)  # vLLM's own prefix cache would leave nothing to replay
                tracked.isolated = True
            self._requests[request.request_id] = tracked
        return tracked

    @property
    def _model_now(self) -> str:
        """The model as it is since the last `reset`: its weights may have changed there."""
        return self._model + self._epoch

    def _drop(self, request: str) -> None:
        """Forget what was computed for a preempted request; what is stored stays."""
        tracked = self._requests.get(request)
        if tracked is None or tracked.loading:
            return  # it begins again already
        self._writer.close(tracked)
        tracked.in_flight = False
        tracked.report = None
        self.counts["preemptions"] += 1
        if tracked.isolated:
            compat.isolate(tracked.request)  # not even this request may find its own approximate states again
        self._restarts.append(request)

    def _loaded(self, request: str) -> None:
        """A load has ended, well or not."""
        tracked = self._requests.get(request)
        if tracked is not None:
            tracked.loading = False
            self._release_plan(tracked)
            if tracked.request.is_finished():
                self._forget(tracked)

    def _forget(self, tracked: Tracked) -> None:
        """A request has ended: let go of all that is held for it, here and in the workers."""
        self._release_plan(tracked)
        self._writer.close(tracked)
        if self._lower is not None:
            self._lower.forget(tracked.request.request_id)
        self._requests.pop(tracked.request.request_id, None)
        self._forgets.append(tracked.request.request_id)

    def _set_plan(self, tracked: Tracked, plan: ReplayPlan) -> None:
        self.catalog.pin(plan.pages, plan.tail_start)
        self.catalog.anchors.pin(plan.anchor)
        tracked.plan = plan

    def _release_plan(self, tracked: Tracked) -> None:
        if tracked.plan is not None:
            self.catalog.unpin(tracked.plan.pages)
            self.catalog.anchors.unpin(tracked.plan.anchor)
            tracked.plan = None

    def _report(self, tracked: Tracked, plan: ReplayPlan | None) -> None:
        if plan is not None:
            if not tracked.options.calibrates:  # nobody asked for it
                self.tally.add(plan, tracked.request.request_id if tracked.options.store else "")
            tracked.report = report_of(plan, tracked.present)

    def _flush_finals(self, meta: StepMetadata) -> None:
        for tracked, puts, saves in self._finals:
            meta.puts += puts
            meta.saves += saves
            meta.finals.append(tracked.request.request_id)
            self._forget(tracked)
        self._finals = []
