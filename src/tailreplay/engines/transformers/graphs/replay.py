"""Graphs of tail replays, one for each combination of tail lengths in use."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tailreplay.engines.transformers import compat
from tailreplay.engines.transformers.backbone import Backbone
from tailreplay.engines.transformers.graphs.base import Graph, GraphDevice
from tailreplay.engines.transformers.graphs.cuda import CudaGraphs
from tailreplay.engines.transformers.replay import run_group

log = logging.getLogger("tailreplay")
BUCKETS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
ReadInto = Callable[[int, int, int, torch.Tensor], None]


@dataclass(frozen=True)
class _Inputs:
    """What a graph reads: fixed memory that is filled before each replay.

    Attributes
    ----------
    hidden : dict of int to torch.Tensor
        By stored group, ``(1, k, d_model)``.
    ids, positions : torch.Tensor
        Of the longest tail's tokens, ``(1, k)``, int64.
    """

    hidden: dict[int, torch.Tensor]
    ids: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True)
class _Recorded:
    inputs: _Inputs
    states: compat.DynamicCache
    graph: Graph


class ReplayGraphs:
    """Replays tails by recorded graphs. Each is made when it is first needed; the least recently used goes first.

    A graph's memory is filled, run and read without the host waiting, in the order of one queue of the device (a stream):
    each queue has its own graphs. One thread at a time. Graphs read weights where they were when recorded.

    Parameters
    ----------
    backbone : Backbone
    device : GraphDevice
        Where to record.
    limit : int
        Graphs kept, at least 1. A graph holds its inputs, its states and the activations of one replay.
    buckets : tuple of int
        Lengths that graphs are made for, ascending.
    """

    def __init__(
        self, backbone: Backbone, device: GraphDevice, limit: int = 8, buckets: tuple[int, ...] = BUCKETS
    ) -> None:
        self._lengths = buckets
        self._backbone = backbone
        self._device = device
        self._limit = limit
        self._graphs: OrderedDict[tuple[int, tuple[int, ...]], _Recorded] = OrderedDict()
        self._failed = False

    @property
    def buckets(self) -> tuple[int, ...]:
        """Lengths that tails should have now: none where there can be no graph, since longer tails would only cost."""
        return () if self._failed or self._has_adapters() else self._lengths

    def __len__(self) -> int:
        return len(self._graphs)

    def replay(
        self, cache: compat.DynamicCache, ids: Sequence[int], tails: tuple[int, ...], read_into: ReadInto
    ) -> bool:
        """Write the states after ``len(ids)`` tokens into `cache`, as `replay.replay` does. Mutates `cache`.

        Parameters
        ----------
        cache : DynamicCache
            Whose linear layers are empty.
        ids : sequence of int
            The matched prefix.
        tails : tuple of int
            k by group.
        read_into : callable
            ``read_into(g, start, stop, out)`` copies the hiddens of the g-th stored group into `out`.

        Returns
        -------
        bool
            False, and nothing done, if there can be no graph for these tails.
        """
        if max(tails, default=0) not in self.buckets:
            return False
        recorded = self._of(tails, ids, read_into)
        if recorded is None:
            return False
        recorded.graph.replay()
        compat.copy_states(recorded.states, cache)
        return True

    def clear(self) -> None:
        """Forget all graphs, as weights may have moved."""
        if self._graphs:
            # Their last replay may be running still, and their memory be read.
            self._device.synchronize()
            self._graphs.clear()

    def _has_adapters(self) -> bool:
        # Switching an adapter changes which modules run, and nobody tells.
        return bool(getattr(self._backbone.model, "_hf_peft_config_loaded", False))

    def _of(self, tails: tuple[int, ...], ids: Sequence[int], read_into: ReadInto) -> _Recorded | None:
        """Return the graph for `tails` with its inputs filled, made if need be; None if it cannot be made."""
        key = (self._device.queue(), tails)
        recorded = self._graphs.get(key)
        if recorded is not None:
            self._graphs.move_to_end(key)
            self._fill(recorded.inputs, ids, tails, read_into)
            return recorded
        inputs = self._inputs(tails)
        self._fill(inputs, ids, tails, read_into)
        try:
            recorded = self._record(inputs, tails)
        except torch.OutOfMemoryError:
            self.clear()  # there may be memory for it another time
            return None
        except Exception as error:
            log.warning("Replay runs without CUDA graphs, since recording one failed: %s", error)
            self._failed = True
            self.clear()
            return None
        if len(self._graphs) >= self._limit:
            self._device.synchronize()
            self._graphs.popitem(last=False)
        self._graphs[key] = recorded
        return recorded

    def _inputs(self, tails: tuple[int, ...]) -> _Inputs:
        backbone, layout = self._backbone, self._backbone.layout
        hidden = {}
        for stored, group in enumerate(backbone.topology.stored_groups):
            part, tail = layout.hidden[stored], tails[group.index]
            hidden[stored] = torch.empty((1, tail, *part.shape), dtype=part.dtype, device=backbone.device)
        ids = torch.empty((1, max(tails)), dtype=torch.int64, device=backbone.device)
        return _Inputs(hidden, ids, torch.empty_like(ids))

    def _fill(self, inputs: _Inputs, ids: Sequence[int], tails: tuple[int, ...], read_into: ReadInto) -> None:
        end, longest = len(ids), max(tails)
        for stored, group in enumerate(self._backbone.topology.stored_groups):
            read_into(stored, end - tails[group.index], end, inputs.hidden[stored][0])
        inputs.ids.copy_(self._backbone.token_ids(list(ids[end - longest :])))
        inputs.positions.copy_(self._backbone.positions(end - longest, end))

    def _record(self, inputs: _Inputs, tails: tuple[int, ...]) -> _Recorded:
        self._device.warm_up(lambda: self._run(inputs, tails, self._backbone.new_cache(1)))
        states = self._backbone.new_cache(1)
        graph = self._device.record(lambda: self._run(inputs, tails, states))
        return _Recorded(inputs, states, graph)

    def _run(self, inputs: _Inputs, tails: tuple[int, ...], cache: compat.DynamicCache) -> None:
        backbone = self._backbone
        stored = {group.index: position for position, group in enumerate(backbone.topology.stored_groups)}
        for group, tail in zip(backbone.topology.groups, tails, strict=True):
            if not tail:
                continue
            if group.stores_hidden:
                hidden = inputs.hidden[stored[group.index]]
            else:
                hidden = backbone.family.embed(backbone.model, inputs.ids[:, -tail:])
            run_group(backbone, group, hidden, inputs.positions[:, -tail:], cache)


def replay_graphs(backbone: Backbone, limit: int, longest: int) -> ReplayGraphs | None:
    """Return graphs for a model on CUDA; None on other devices, or if `limit` is 0.

    Parameters
    ----------
    longest : int
        Tokens that may be run at once: there are no graphs of more.
    """
    if backbone.device.type != "cuda" or limit < 1 or not backbone.topology.is_hybrid:
        return None
    buckets = tuple(bucket for bucket in BUCKETS if bucket <= longest)
    return ReplayGraphs(backbone, CudaGraphs(backbone.device), limit, buckets)
