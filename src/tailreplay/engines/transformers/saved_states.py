"""The states of a model as the tensors of an anchor, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tailreplay.engines.transformers import compat
from tailreplay.pages import PartSpec
from tailreplay.topology import Topology


@dataclass(frozen=True)
class StateSpecs:
    """Which tensors a model's states are, learned from a cache that has seen a token.

    Attributes
    ----------
    parts : tuple of PartSpec
        ``c3``/``s3``: convolution and recurrent state of layer 3, without their batch dimension.
    entries : tuple of (int, str, int)
        Layer, "conv" or "recurrent", and the width of the convolution (0 for a recurrent state), part by part.
    """

    parts: tuple[PartSpec, ...]
    entries: tuple[tuple[int, str, int], ...]

    @classmethod
    def of(cls, cache: compat.DynamicCache, topology: Topology) -> StateSpecs:
        """Read them off `cache`."""
        parts, entries = [], []
        for group in topology.groups:
            for layer in group.stateful:
                for kind, state in zip(("conv", "recurrent"), compat.states(cache, layer), strict=True):
                    if state is not None:
                        name = f"{'c' if kind == 'conv' else 's'}{layer}"
                        parts.append(PartSpec(name, tuple(state.shape[1:]), state.dtype))
                        entries.append((layer, kind, compat.conv_width(cache, layer) if kind == "conv" else 0))
        return cls(tuple(parts), tuple(entries))

    @property
    def recurrent(self) -> tuple[bool, ...]:
        """Which parts are recurrent states."""
        return tuple(kind == "recurrent" for _, kind, _ in self.entries)

    def read(self, cache: compat.DynamicCache) -> list[torch.Tensor] | None:
        """Return views of the states in `cache`, part by part; None if some layer has none yet."""
        views = []
        for (layer, kind, _), part in zip(self.entries, self.parts, strict=True):
            state = compat.states(cache, layer)[kind == "recurrent"]
            if state is None or state.shape[1:] != part.shape:
                return None
            views.append(state[0])
        return views

    def make(self, cache: compat.DynamicCache, device: torch.device) -> list[torch.Tensor]:
        """Return views of new states in `cache`, whose layers are empty, to be filled. Mutates `cache`."""
        views = []
        for (layer, kind, width), part in zip(self.entries, self.parts, strict=True):
            like = torch.empty((1, *part.shape), dtype=part.dtype, device=device)
            views.append(compat.make_state(cache, layer, kind, like, width)[0])
        return views
