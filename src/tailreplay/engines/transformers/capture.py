"""Taps that collect each group's hidden as the model computes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch

from tailreplay.topology import Topology

Sink = list[list[torch.Tensor]]


class HiddenTaps:
    """Forward pre-hooks on the first layer after each FA layer that has a group.

    A pre-hook sees what the layer gets, so whatever a family does to a layer's output (a residual multiplier, a norm) is in
    it already. The hooks stay installed and cost one comparison while nothing is captured.

    Parameters
    ----------
    layers : torch.nn.ModuleList
        The model's decoder layers.
    """

    def __init__(self, layers: torch.nn.ModuleList, topology: Topology) -> None:
        self._sink: Sink | None = None
        self._thread = 0
        for index, group in enumerate(topology.stored_groups):
            layers[group.layers[0]].register_forward_pre_hook(self._hook(index), with_kwargs=True)

    @contextmanager
    def into(self, sink: Sink) -> Iterator[None]:
        """Append hiddens of shape ``(n, d_model)`` to ``sink[g]`` for each stored group g while the block runs.

        Only what this thread computes is taken, should somebody else run the model meanwhile.
        """
        self._sink, self._thread = sink, get_ident()
        try:
            yield
        finally:
            self._sink = None

    def _hook(self, index: int) -> Any:
        def tap(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._sink is not None and self._thread == get_ident():
                hidden = args[0] if args else kwargs["hidden_states"]
                self._sink[index].append(hidden[0])

        return tap


_taps: WeakKeyDictionary[torch.nn.ModuleList, HiddenTaps] = WeakKeyDictionary()


def taps_of(layers: torch.nn.ModuleList, topology: Topology) -> HiddenTaps:
    """Return the taps of a model's layers, installed once however many wrappers the model has."""
    taps = _taps.get(layers)
    if taps is None:
        taps = _taps[layers] = HiddenTaps(layers, topology)
    return taps
