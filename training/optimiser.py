"""Muon for matrices, AdamW for the rest, and slow steps for what decides how fast heads forget."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from training.initial import dt_bias_of
from training.settings import OptimiserSettings

_DECAY = ("A_log", "dt_bias", "in_proj_a.weight")
_NOT_MUON = ("embed_tokens.weight", "in_proj_b.weight", *_DECAY)
_SHORTEST, _LONGEST = 2.0, 512.0
"""Limits of base horizons, in tokens. A head that never forgets would do what attention is for."""
_QUINTIC = (3.4445, -4.7750, 2.0315)


class Optimiser:
    """Both optimisers of one model. `step` changes the parameters; gradients are read, not cleared.

    Parameters
    ----------
    parameters : dict of str to Parameter
    settings : OptimiserSettings
    """

    def __init__(self, parameters: dict[str, nn.Parameter], settings: OptimiserSettings) -> None:
        self.settings = settings
        matrix = {n: p for n, p in parameters.items() if p.ndim == 2 and not n.endswith(_NOT_MUON)}
        decay = [p for n, p in parameters.items() if n.endswith(_DECAY)]
        rest = [p for n, p in parameters.items() if n not in matrix and not n.endswith(_DECAY)]
        self.momentum = {name: torch.zeros_like(p) for name, p in matrix.items()}
        self._matrix = matrix
        # Products of one shape run as one batch.
        self._shapes: dict[tuple[int, int], list[str]] = {}
        for name, p in matrix.items():
            self._shapes.setdefault((min(p.shape), max(p.shape)), []).append(name)
        self._biases = [(p, parameters[n.replace("dt_bias", "A_log")]) for n, p in parameters.items() if "dt_bias" in n]
        self._small = rest + decay
        groups = [
            {"params": rest, "lr": settings.adam, "base": settings.adam},
            {"params": decay, "lr": settings.decay_parameters, "base": settings.decay_parameters},
        ]
        self.adam = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0)

    @torch.no_grad()
    def step(self, scale: float) -> float:
        """Take a step at `scale` times the base rates; returns the norm of AdamW's gradients before clipping."""
        norm = nn.utils.clip_grad_norm_(self._small, self.settings.clip)
        for group in self.adam.param_groups:
            group["lr"] = group["base"] * scale
        self.adam.step()
        rate = self.settings.muon * scale
        for names in self._shapes.values():
            self._step_matrices(names, rate)
        for bias, log_rate in self._biases:
            log_rate.clamp_(-0.7, 0.7)
            bias.clamp_(dt_bias_of(_LONGEST), dt_bias_of(_SHORTEST))
        return float(norm)

    def _step_matrices(self, names: list[str], rate: float) -> None:
        beta = self.settings.momentum
        wide = []
        for name in names:
            gradient = self._matrix[name].grad
            assert gradient is not None, f"no gradient for {name}"
            self.momentum[name].lerp_(gradient, 1 - beta)
            update = gradient.lerp(self.momentum[name], beta)
            wide.append(update if update.shape[0] <= update.shape[1] else update.t())
        for name, update in zip(names, orthogonal(torch.stack(wide)), strict=True):
            p = self._matrix[name]
            turned = update if p.shape[0] <= p.shape[1] else update.t()
            p.mul_(1 - rate * self.settings.weight_decay)
            p.add_(turned, alpha=-rate * math.sqrt(max(1, p.shape[0] / p.shape[1])))

    def state(self) -> dict[str, Any]:
        """Return what `load` needs; tensors are shared with the optimiser."""
        return {"momentum": self.momentum, "adam": self.adam.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        for name, value in state["momentum"].items():
            self.momentum[name].copy_(value)
        self.adam.load_state_dict(state["adam"])


def orthogonal(wide: Tensor) -> Tensor:
    """Return matrices near the closest with orthonormal rows, by five Newton-Schulz steps in bfloat16.

    Parameters
    ----------
    wide : Tensor, shape (count, rows, columns), rows <= columns
    """
    a, b, c = _QUINTIC
    x = (wide / (wide.flatten(1).norm(dim=1)[:, None, None] + 1e-7)).bfloat16()
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    result: Tensor = x.float()
    return result
