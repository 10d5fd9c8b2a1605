"""Taps that collect each group's hidden as the model computes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tailreplay.topology import Topology

Sink = list[list[torch.Tensor]]


class HiddenTaps:
    """Forward pre-hooks on the first layer after each FA layer that has a group.

    A pre-hook sees what the layer gets, so whatever a family does to a layer's output (residual multipliers, post-norms)
    is in it already. The hooks stay installed and cost one comparison while nothing is captured.

    Parameters
    ----------
    layers : torch.nn.ModuleList
        The model's decoder layers.
    """

    def __init__(self, layers: torch.nn.ModuleList, topology: Topology) -> None:
        self._sink: Sink | None = None
        self._handles = [
            layers[group.layers[0]].register_forward_pre_hook(self._hook(index), with_kwargs=True)
            for index, group in enumerate(topology.stored_groups)
        ]

    @contextmanager
    def into(self, sink: Sink) -> Iterator[None]:
        """Append hiddens of shape ``(n, d_model)`` to ``sink[g]`` for each stored group g while the block runs."""
        self._sink = sink
        try:
            yield
        finally:
            self._sink = None

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, index: int) -> Any:
        def tap(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._sink is not None:
                hidden = args[0] if args else kwargs["hidden_states"]
                self._sink[index].append(hidden[0])

        return tap
