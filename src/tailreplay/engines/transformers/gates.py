"""What the linear layers forget, taken down as the model computes it and summed by page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from tailreplay.engines.transformers import compat
from tailreplay.engines.transformers.families.gates import Gate
from tailreplay.engines.transformers.families.generic import Family
from tailreplay.topology import Topology

Raw = list[list[torch.Tensor]]
# Half a number's last bit in float16, so that what is kept never says more than was forgotten.
_ROUNDING = 1 - 2.0**-10


class GateTaps:
    """Forward hooks on the modules that give the gates. They stay, and cost one comparison while nothing is captured."""

    def __init__(self, mixers: Sequence[torch.nn.Module], gate: Gate) -> None:
        self.mixers = tuple(mixers)
        self.gate = gate
        self._sink: Raw | None = None
        self._thread = 0
        for index, mixer in enumerate(mixers):
            gate.source(mixer).register_forward_hook(self._hook(index, mixer))

    @contextmanager
    def into(self, sink: Raw) -> Iterator[None]:
        """Append what each mixer's gates are made of to ``sink[layer]`` while the block runs, on this thread."""
        self._sink, self._thread = sink, get_ident()
        try:
            yield
        finally:
            self._sink = None

    def log_alpha(self, raw: Raw) -> torch.Tensor:
        """Return log alpha of what was captured, ``(layers, n, heads)``."""
        stacked = torch.stack([torch.cat(parts) if len(parts) > 1 else parts[0] for parts in raw])
        return self.gate.log_alpha(self.mixers, stacked)

    def _hook(self, index: int, mixer: torch.nn.Module) -> Callable[..., None]:
        def tap(module: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
            if self._sink is not None and self._thread == get_ident():
                self._sink[index].append(self.gate.raw(mixer, output))

        return tap


_taps: WeakKeyDictionary[torch.nn.ModuleList, GateTaps] = WeakKeyDictionary()


def gate_taps_of(layers: torch.nn.ModuleList, family: Family, topology: Topology) -> GateTaps | None:
    """Return a model's taps, installed once however many wrappers it has; None if its layers have no gates."""
    if family.gate is None or not topology.groups:
        return None
    taps = _taps.get(layers)
    if taps is None:
        mixers = [family.mixer(layers[layer]) for layer in gated_layers(topology)]
        taps = _taps[layers] = GateTaps(mixers, family.gate)
    return taps


def gated_layers(topology: Topology) -> list[int]:
    """Return the layers with a state, in the order of the groups."""
    return [layer for group in topology.groups for layer in group.stateful]


class GateRun:
    """Gates of a running sequence from the last sealed page on."""

    def __init__(self, taps: GateTaps, topology: Topology, page_size: int) -> None:
        self.raw: Raw = [[] for _ in taps.mixers]
        self._taps = taps
        self._topology = topology
        self._page_size = page_size
        # Of tokens that were reused: what they forget is known from the page they came from, if at all.
        self._carried: NDArray[np.float32] | None = None
        self._carried_tokens = 0

    @property
    def taps(self) -> GateTaps:
        """Where `raw` is filled from."""
        return self._taps

    def carry(self, tokens: int, gates: NDArray[Any] | None) -> None:
        """Begin with `tokens` tokens that are not computed: `gates` of just these, or None. Mutates self.

        What is not known is taken for nothing, which says less than was forgotten.
        """
        self._carried_tokens = tokens
        self._carried = None if gates is None else gates[0].astype(np.float32)

    def fork(self) -> GateRun:
        """Return an independent copy."""
        twin = GateRun(self._taps, self._topology, self._page_size)
        twin.raw = [list(parts) for parts in self.raw]
        twin._carried, twin._carried_tokens = self._carried, self._carried_tokens
        return twin

    def take(self, count: int, cache: compat.DynamicCache) -> list[NDArray[Any]] | None:
        """Return the pages of the next `count` tokens and forget these. Mutates self.

        Parameters
        ----------
        cache : DynamicCache
            With the states after the last captured token: the heads' shares are theirs.

        Returns
        -------
        list of ndarray, or None
            One a page, ``(2, layers, heads)``, float16; see `tailreplay.page.Page.gates`. None where there is no state.
        """
        if any(compat.states(cache, layer)[1] is None for layer in gated_layers(self._topology)):
            return None  # nothing was computed, and not every group replayed
        computed = count - self._carried_tokens
        shares = head_shares(cache, self._topology)
        layers, heads = shares.shape
        if self.raw[0]:
            logs = self._taps.log_alpha(self.raw)
            rest = [parts[-1][parts[-1].shape[0] - (logs.shape[1] - computed) :].clone() for parts in self.raw]
            self.raw = [[rows] if rows.shape[0] else [] for rows in rest]
        else:
            logs = shares.new_zeros((layers, 0, heads))  # all that is stored was reused
        pages = -(-count // self._page_size)
        padded = logs.new_zeros((layers, pages * self._page_size, heads))
        padded[:, self._carried_tokens : count] = logs[:, :computed]
        sums = padded.unflatten(1, (pages, self._page_size)).sum(2).transpose(0, 1).cpu().numpy()
        if self._carried is not None:
            sums[0] += self._carried
        self._carried, self._carried_tokens = None, 0
        held = shares.cpu().numpy().astype(np.float16)
        lowest = float(np.finfo(np.float16).min)
        return [np.stack([row, held]) for row in np.maximum(sums * _ROUNDING, lowest).astype(np.float16)]


def head_shares(cache: compat.DynamicCache, topology: Topology) -> torch.Tensor:
    """Return each head's share of its layer's squared state norm, ``(layers, heads)``; equal ones for a zero state."""
    norms = []
    for layer in gated_layers(topology):
        state = compat.states(cache, layer)[1]
        assert state is not None
        norms.append(torch.linalg.vector_norm(state[0].flatten(1), dim=1, dtype=torch.float32))
    squared = torch.stack(norms).square()
    total = squared.sum(-1, keepdim=True)
    return torch.where(total > 0, squared / total, 1.0 / squared.shape[1])
