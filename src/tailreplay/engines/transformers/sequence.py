"""One running sequence: restored from the cache, extended by the model, stored as it grows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Sequence_
from typing import Any

import torch

from tailreplay.ablation import METHOD, Ablation
from tailreplay.cache import PrefixCache
from tailreplay.chain import Chain
from tailreplay.clock import Clock, HostClock
from tailreplay.engines.transformers import compat
from tailreplay.engines.transformers.backbone import Backbone
from tailreplay.engines.transformers.capture import Sink
from tailreplay.engines.transformers.graphs.replay import ReplayGraphs
from tailreplay.engines.transformers.replay import reads_of, replay
from tailreplay.engines.transformers.staging import Staging
from tailreplay.keys import Namespace
from tailreplay.mean_states import begin_with
from tailreplay.plan import ReplayPlan
from tailreplay.provenance import EXACT, Provenance, Start
from tailreplay.streams import CopyStream
from tailreplay.views import PagesView

log = logging.getLogger("tailreplay")


class Interrupted(Exception):
    """Somebody else wants the model."""


class Sequence:
    """Tokens that have been computed, with their cache entries and the pages that hold them.

    Parameters
    ----------
    backbone : Backbone
    cache : PrefixCache
        Bound to the backbone's layout.
    namespace : Namespace
        Of the pages that it stores.
    capacity : int
        Tokens to make room for at first.
    store : bool
        Whether to store pages as they fill.
    """

    def __init__(
        self, backbone: Backbone, cache: PrefixCache, namespace: Namespace, capacity: int, store: bool = True
    ) -> None:
        self.tokens: list[int] = []
        self.provenance: Provenance = EXACT
        self._clock: Clock = HostClock()
        self._copy_marks: tuple[Any, Any] | None = None
        self._replay_marks: tuple[Any, Any] | None = None
        self._backbone = backbone
        self._cache = cache
        self._namespace = namespace
        self._store = store
        self._past = backbone.new_cache(capacity)
        self._pending: Sink = [[] for _ in backbone.topology.stored_groups]
        self._gates = backbone.gate_run(cache.page_size) if store else None
        self._chain: Chain | None = None
        self._saved = 0
        self._copies = CopyStream(backbone.device)

    @property
    def past(self) -> compat.DynamicCache:
        """The library's cache: keys, values and states after `tokens`."""
        return self._past

    @property
    def is_storing(self) -> bool:
        """Whether what is computed next will be stored."""
        return self._chain is not None and not self._chain.stopped

    @property
    def copy_seconds(self) -> float:
        """Time that `restore` took for keys and values; with a clock of the device, blocks until they are there."""
        return self._clock.between(*self._copy_marks) if self._copy_marks is not None else 0.0

    @property
    def replay_seconds(self) -> float:
        """Time that `restore` took to replay, waits for copies that outlast it included; blocks likewise."""
        return self._clock.between(*self._replay_marks) if self._replay_marks is not None else 0.0

    @torch.inference_mode()
    def restore(
        self,
        plan: ReplayPlan,
        ids: list[int],
        chunk: int = 2048,
        graphs: ReplayGraphs | None = None,
        ablation: Ablation = METHOD,
        clock: Clock | None = None,
        interrupt: Callable[[], bool] = lambda: False,
        mean: Sequence_[torch.Tensor] | None = None,
    ) -> None:
        """Begin with what `plan` matched of `ids`: copy its keys and values, replay its tails. Mutates self.

        The copies run on a side stream while replay computes; they do not depend on each other. The plan may be
        released after `wait_loaded`.

        Parameters
        ----------
        chunk : int
            Longest run of tokens replayed at once.
        graphs : ReplayGraphs, optional
            Replays the tails that it has graphs for.
        ablation : Ablation
            For benchmarks: what to do without.
        clock : Clock, optional
            Times the phases; the host's if not given.
        interrupt : callable
            Asked before each chunk of the replay.
        mean : sequence of torch.Tensor, optional
            The model's mean state, for plans that begin with it.

        Raises
        ------
        Interrupted
            If `interrupt` said so; the sequence is of no more use.
        """
        assert not self.tokens
        self._clock = clock = clock or HostClock()
        if self._store:
            self._chain = self._cache.open(self._namespace, plan)
        if plan.matched == 0:
            return
        reader = self._cache.fetch(plan)
        layout, device = self._backbone.layout, self._backbone.device

        begin = clock.mark()
        copies = self._copies
        if plan.anchor is not None or plan.start is Start.MEAN:
            self._begin_states(plan, reader, mean)
        reads = reads_of(self._backbone.topology, plan.tails, plan.matched, chunk)
        hiddens = Staging(reader, layout, device, reads)
        rows = [
            entry.reserve(plan.matched, keys.token(device), values.token(device))
            for entry, (keys, values) in zip(self._backbone.kv(self._past), layout.kv, strict=True)
        ]
        try:
            with copies.copying():
                for index, (keys, values) in enumerate(rows):
                    reader.keys_values(index, keys, values)
            self._copy_marks = begin, copies.mark(clock)
            if not ablation.overlap:
                copies.wait()
            copied = clock.mark()
            matched = ids[: plan.matched]
            # Graphs begin with zero states.
            zero = plan.anchor is None and plan.start is not Start.MEAN
            usable = graphs if ablation.skip and zero else None
            if usable is None or not usable.replay(self._past, matched, plan.tails, hiddens.into):

                def read(group: int, start: int, stop: int) -> torch.Tensor:
                    if interrupt():
                        raise Interrupted
                    return hiddens.hidden(group, start, stop)

                replay(self._backbone, self._past, matched, plan.tails, read, chunk, ablation.skip)
            lacking = bool(self._pending) and not plan.pages[-1].has_hidden
            if self._chain is not None and self._chain.tokens < plan.matched and lacking:
                # The hit began with saved states and ends inside a page whose hiddens are gone: it cannot be filled.
                self.abandon()
            if self._chain is not None and self._chain.tokens < plan.matched:
                # The hit ends inside a page: the next page needs these hiddens again.
                if self._gates is not None:
                    whole = plan.pages[-1].start + plan.pages[-1].tokens == plan.matched
                    self._gates.carry(plan.matched - self._chain.tokens, plan.pages[-1].gates if whole else None)
                for group, pending in enumerate(self._pending):
                    pending.append(hiddens.hidden(group, self._chain.tokens, plan.matched)[0])
        finally:
            # Also when replay fails: nothing may reuse the buffers before the copies into them have ended.
            copies.wait()
        self._replay_marks = copied, clock.mark()
        self.tokens = list(ids[: plan.matched])
        if plan.anchor is not None and plan.anchor.position == plan.matched:
            self._saved = plan.matched
        self.provenance = plan.provenance
        if plan.worth_saving:
            # A second request ends its match here: a third may.
            self.save_states()

    def _begin_states(self, plan: ReplayPlan, reader: PagesView, mean: Sequence_[torch.Tensor] | None) -> None:
        """Put the states in place that the replay begins with."""
        specs = self._backbone.states
        views = specs.make(self._past, self._backbone.device)
        if plan.anchor is not None:
            with self._copies.copying():
                reader.states(views)
            self._copies.wait()
        if plan.start in (Start.MEAN, Start.MIXED):
            assert mean is not None
            begin_with(views, mean, specs.recurrent, mixed=plan.start is Start.MIXED)

    def wait_loaded(self) -> None:
        """Block until `restore` needs its plan's pages no more (at once on CPU)."""
        self._copies.synchronize()

    @torch.inference_mode()
    def extend(self, ids: list[int]) -> torch.Tensor:
        """Compute `ids` after the tokens so far and store the pages that fill. Mutates self.

        Returns
        -------
        torch.Tensor
            Logits after the last of them, ``(vocabulary,)``.
        """
        return self.extend_last(ids, 1)[0]

    @torch.inference_mode()
    def extend_last(self, ids: list[int], keep: int) -> torch.Tensor:
        """Do what `extend` does and return the logits after each of the last `keep` tokens, ``(keep, vocabulary)``."""
        storing = self._chain is not None and not self._chain.stopped
        sink, gates = (self._pending, self._gates) if storing else (None, None)
        logits = self._backbone.forward(ids, len(self.tokens), self._past, sink, keep, gates)
        self.tokens.extend(ids)
        if storing:
            self._seal(len(self.tokens) // self._cache.page_size * self._cache.page_size)
        return logits

    def fork(self, capacity: int) -> Sequence:
        """Return an independent copy: same tokens, same states, its own future."""
        twin = Sequence(self._backbone, self._cache, self._namespace, 1, self._store)
        with torch.inference_mode():
            twin._past = self._backbone.copy_cache(self._past, capacity)
        twin.tokens = list(self.tokens)
        twin.provenance = self.provenance
        twin._saved = self._saved
        twin._pending = [list(pending) for pending in self._pending]
        twin._gates = self._gates.fork() if self._gates is not None else None
        twin._chain = self._cache.fork(self._chain) if self._chain is not None else None
        return twin

    @torch.inference_mode()
    def save_states(self) -> None:
        """Store the states after the tokens so far as an anchor, if pages are stored and there is room for one."""
        chain, count = self._chain, len(self.tokens)
        if chain is None or chain.stopped or count <= self._saved or not self._cache.saves_states:
            return
        self._saved = count
        states = self._backbone.states.read(self._past)
        if states is None:
            return
        try:
            self._cache.save_states(chain, self.tokens[chain.tokens :], states, self.provenance)
        except Exception:
            # The answer does not depend on it.
            log.exception("Saving the states after %d tokens failed.", count)

    @torch.inference_mode()
    def finish(self) -> None:
        """Store the states and the last, partial page, and end the chain. A second call does nothing."""
        if self._chain is not None:
            try:
                self.save_states()
                self._seal(len(self.tokens))
            finally:
                self._cache.close(self._chain)
                self._chain = None

    def abandon(self) -> None:
        """End the chain without storing more: for a sequence that failed."""
        if self._chain is not None:
            self._cache.close(self._chain)
            self._chain = None

    def _seal(self, stop: int) -> None:
        """Store tokens up to `stop` and drop what was pending for them."""
        chain = self._chain
        assert chain is not None
        start = chain.tokens
        if chain.stopped or stop <= start:
            return
        count = stop - start
        hidden = [torch.cat(pending) if len(pending) > 1 else pending[0] for pending in self._pending]
        kv = [entry.rows(start, stop) for entry in self._backbone.kv(self._past)]
        gates = self._gates.take(count, self._past) if self._gates is not None else None
        tokens, kept = self.tokens[start:stop], [rows[:count] for rows in hidden]
        try:
            self._cache.insert(chain, tokens, kv, kept, self.provenance, gates)
        except Exception:
            # The answer does not depend on it: go on without storing the rest of this sequence.
            log.exception("Storing %d tokens failed; the rest of this sequence is not stored.", count)
        # A clone lets go of the chunk that the rest is a view of.
        self._pending = [[rows[count:].clone()] if rows.shape[0] > count else [] for rows in hidden]
