"""Slow, plain versions of the kernels, one line of mathematics a token: the oracle of their values and gradients.

Give them float64. They are differentiable by torch's own rules.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_delta(mixed: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """See `training.kernels.ops.gated_delta`."""
    batch, tokens, heads = beta.shape
    query, key, value = mixed.view(batch, tokens, 3, heads, -1).unbind(2)
    query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    dim = value.shape[-1]
    state = mixed.new_zeros(batch, heads, dim, dim)
    out = []
    for i in range(tokens):
        state = log_decay[:, i].exp()[..., None, None] * state
        recalled = torch.einsum("bhk,bhkv->bhv", key[:, i], state)
        correction = beta[:, i, :, None] * (value[:, i] - recalled)
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, i], correction)
        out.append(torch.einsum("bhk,bhkv->bhv", query[:, i], state) / dim**0.5)
    return torch.stack(out, 1).flatten(2)


def short_conv(x: Tensor, weight: Tensor) -> Tensor:
    """See `training.kernels.ops.short_conv`."""
    width = weight.shape[1]
    padded = F.pad(x, (0, 0, width - 1, 0))
    return F.silu(sum((padded[:, j : j + x.shape[1]] * weight[:, j] for j in range(width)), x.new_zeros(())))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `training.kernels.ops.rms_norm`."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + weight)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `training.kernels.ops.gated_rms_norm`."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight * F.silu(gate)


def swiglu(x: Tensor) -> Tensor:
    """See `training.kernels.ops.swiglu`."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up
