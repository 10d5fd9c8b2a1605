"""Where a family's forget gates come from: the module whose output holds them, and the formula of log alpha."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional


class Gate(Protocol):
    """How to read the gates of one kind of mixer."""

    def source(self, mixer: torch.nn.Module) -> torch.nn.Module:
        """Return the module whose output holds them."""
        ...

    def raw(self, mixer: torch.nn.Module, output: torch.Tensor) -> torch.Tensor:
        """Return what of the module's output, ``(1, n, …)``, the formula needs: ``(n, …)``, and little memory."""
        ...

    def log_alpha(self, mixers: Sequence[torch.nn.Module], raw: torch.Tensor) -> torch.Tensor:
        """Return log alpha of all mixers at once, ``(layers, n, heads)``, from `raw` stacked to ``(layers, n, …)``."""
        ...


@dataclass(frozen=True)
class DeltaGate:
    """Gated DeltaNet: ``log alpha = -exp(A_log) softplus(a + dt_bias)``, with a projection of its own for a.

    Attributes
    ----------
    projection : str
        Name of that linear layer.
    by_key_head : bool
        Whether it gives b and a of each key head's value heads in turn (Qwen3-Next), instead of a alone.
    """

    projection: str = "in_proj_a"
    by_key_head: bool = False

    def source(self, mixer: torch.nn.Module) -> torch.nn.Module:
        found: torch.nn.Module = getattr(mixer, self.projection)
        return found

    def raw(self, mixer: torch.nn.Module, output: torch.Tensor) -> torch.Tensor:
        if self.by_key_head:
            heads: Any = mixer.num_k_heads
            second: torch.Tensor = output[0].unflatten(-1, (heads, 2, -1))[:, :, 1]
            return second.flatten(1)
        return output[0]

    def log_alpha(self, mixers: Sequence[torch.nn.Module], raw: torch.Tensor) -> torch.Tensor:
        rate, bias = _stacked(mixers, "A_log").float().exp(), _stacked(mixers, "dt_bias")
        return -rate * functional.softplus(raw.float() + bias)


@dataclass(frozen=True)
class KimiGate:
    """Kimi delta attention: a gate for each key channel, of which a head's greatest is taken."""

    def source(self, mixer: torch.nn.Module) -> torch.nn.Module:
        found: Any = mixer.forget_gate
        gate: torch.nn.Module = found
        return gate

    def raw(self, mixer: torch.nn.Module, output: torch.Tensor) -> torch.Tensor:
        return output[0].amax(-1)  # the channels' own would be a head's width times as much

    def log_alpha(self, mixers: Sequence[torch.nn.Module], raw: torch.Tensor) -> torch.Tensor:
        return raw.float()


@dataclass(frozen=True)
class MambaGate:
    """Mamba-2: ``log alpha = -exp(A_log) dt`` with ``dt = softplus(dt + dt_bias)``, the last part of the input projection.

    The library bounds dt in a prefill, but not in a step of one token. Only the upper bound is kept here: where the
    lower one was at work, the state has forgotten more than this says.
    """

    def source(self, mixer: torch.nn.Module) -> torch.nn.Module:
        found: Any = mixer.in_proj
        projection: torch.nn.Module = found
        return projection

    def raw(self, mixer: torch.nn.Module, output: torch.Tensor) -> torch.Tensor:
        heads: Any = mixer.num_heads
        return output[0, :, -heads:].clone()  # a view would keep all of the projection

    def log_alpha(self, mixers: Sequence[torch.nn.Module], raw: torch.Tensor) -> torch.Tensor:
        step = functional.softplus(raw + _stacked(mixers, "dt_bias").to(raw.dtype))
        limit: Any = mixers[0].time_step_limit
        return -_stacked(mixers, "A_log").float().exp() * step.clamp(max=limit[1]).float()


MAMBA = MambaGate()


def _stacked(mixers: Sequence[torch.nn.Module], name: str) -> torch.Tensor:
    return torch.stack([getattr(mixer, name).detach() for mixer in mixers])[:, None]
