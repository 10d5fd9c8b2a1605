"""What is kept of a document while it is computed: exact states at anchors, and how much each head forgets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from tailreplay.engines.transformers import compat
from tailreplay.engines.transformers.backbone import Backbone
from tailreplay.errors import InvalidRequestError


class Trail:
    """Anchors and gates of one sequence.

    Parameters
    ----------
    backbone : Backbone
    positions : iterable of int
        Where anchors are wanted, in tokens.
    gates : bool
        Whether to keep the decays of every head and token too.

    Raises
    ------
    InvalidRequestError
        If decays are wanted of a model whose mixers do not have Qwen's gates.
    """

    def __init__(self, backbone: Backbone, positions: Iterable[int], gates: bool = False) -> None:
        self._backbone = backbone
        self._wanted = sorted(set(positions) - {0})
        self._states: dict[int, compat.DynamicCache] = {}
        self._mixers = {i: backbone.family.mixer(backbone.layers[i]) for i in stateful_layers(backbone)}
        self._gates: dict[int, list[torch.Tensor]] | None = {i: [] for i in self._mixers} if gates else None
        if gates and not all(_has_gates(mixer) for mixer in self._mixers.values()):
            raise InvalidRequestError(
                "'decayed' knows the gates of Qwen3.5's linear layers only: leave it out.", "methods"
            )

    def stop(self, start: int, stop: int) -> int:
        """Return how far to compute from `start` at most, so that no anchor is run over."""
        return next((position for position in self._wanted if start < position < stop), stop)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep the gates of what the model computes while the block runs. Mutates self."""
        handles = []
        if self._gates is not None:
            for layer, mixer in self._mixers.items():
                handles.append(mixer.register_forward_pre_hook(self._hook(layer), with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def passed(self, position: int, past: compat.DynamicCache) -> None:
        """Keep the states of `past`, which holds `position` tokens, if an anchor is wanted there. Mutates self."""
        if position in self._wanted:
            kept = compat.new_cache(self._backbone.config)
            compat.copy_states(past, kept)
            self._states[position] = kept

    def fork(self, positions: Iterable[int]) -> Trail:
        """Return a trail of another future with the anchors so far, which wants those at `positions` too."""
        twin = Trail(self._backbone, [*self._wanted, *positions])
        twin._states = dict(self._states)
        if self._gates is not None:
            twin._gates = {layer: list(parts) for layer, parts in self._gates.items()}
        return twin

    def put(self, position: int, target: compat.DynamicCache) -> None:
        """Copy the states at an anchor into the empty cache `target`; before the first token there are none."""
        if position:
            compat.copy_states(self._states[position], target)

    def decay(
        self, target: compat.DynamicCache, start: int, stop: int, towards: compat.DynamicCache | None = None
    ) -> None:
        """Let recurrent states decay over tokens ``start .. stop-1``, to zero or `towards` others. Mutates `target`."""
        assert self._gates is not None, "the trail was made without gates"
        if start == stop:
            return
        for layer, parts in self._gates.items():
            state = compat.states(target, layer)[1]
            if state is None:
                continue
            kept = torch.cat(parts, 1)[:, start:stop].sum(1).exp()[:, :, None, None].to(state.dtype)
            state *= kept
            other = None if towards is None else compat.states(towards, layer)[1]
            if other is not None:
                state += (1 - kept) * other.to(state.dtype)

    def _hook(self, layer: int):  # type: ignore[no-untyped-def]
        def keep(mixer: torch.nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> None:
            assert self._gates is not None
            self._gates[layer].append(log_decay(mixer, args[0] if args else kwargs["hidden_states"]))

        return keep


def log_decay(mixer: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Return the log of each head's decay, at most 0: ``(1, n, heads)``, float32, for inputs ``(1, n, d_model)``."""
    wish: torch.Tensor = mixer.in_proj_a(inputs)  # type: ignore[operator]
    scale, bias = mixer.A_log.float().exp(), mixer.dt_bias  # type: ignore[operator, union-attr]
    found: torch.Tensor = -scale * F.softplus(wish.float() + bias)  # type: ignore[operator]
    return found


def stateful_layers(backbone: Backbone) -> list[int]:
    """Return the layers that hold states, in layer order."""
    return [layer for group in backbone.topology.groups for layer in group.stateful]


def _has_gates(mixer: torch.nn.Module) -> bool:
    return all(hasattr(mixer, name) for name in ("in_proj_a", "A_log", "dt_bias"))
