"""The kernels as differentiable functions. Inputs are made contiguous; nothing is changed in place.

Activations that go into or come out of matrix products may be bfloat16; parameters, states and residuals are float32, or
float64 in tests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from training.kernels.build import kernels


class _GatedDelta(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mixed: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        mixed, log_decay, beta = mixed.contiguous(), log_decay.contiguous(), beta.contiguous()
        out: Tensor
        out, kept = kernels().gated_delta_forward(mixed, log_decay, beta)
        ctx.save_for_backward(mixed, log_decay, beta, kept)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(kernels().gated_delta_backward(*ctx.saved_tensors, grads[0].contiguous()))


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: Tensor) -> Tensor:
        x, taps = x.contiguous(), taps.contiguous()
        ctx.save_for_backward(x, taps)
        out: Tensor = kernels().short_conv_forward(x, taps)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(kernels().short_conv_backward(*ctx.saved_tensors, grads[0].contiguous()))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, offset: float, eps: float) -> Tensor:
        x, z = x.contiguous(), gate.contiguous()
        y: Tensor
        y, factor = kernels().rms_norm_forward(x, z, weight, offset, eps)
        ctx.save_for_backward(x, z, weight, factor)
        ctx.offset = offset
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx, dz, dw = kernels().rms_norm_backward(*ctx.saved_tensors, grads[0].contiguous(), ctx.offset)
        return dx, dz if dz.numel() else None, dw, None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        out: Tensor = kernels().swiglu_forward(x)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        out: Tensor = kernels().swiglu_backward(ctx.saved_tensors[0], grads[0].contiguous())
        return out


def gated_delta(mixed: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Gated delta rule from a zero state, with L2-normalised queries and keys.

    Parameters
    ----------
    mixed : Tensor, shape (batch, tokens, 3 * heads * dim), float32 or float64
        Queries, keys and values of all heads, in this order.
    log_decay, beta : Tensor, shape (batch, tokens, heads)

    Returns
    -------
    Tensor, shape (batch, tokens, heads * dim)
    """
    out: Tensor = _GatedDelta.apply(mixed, log_decay, beta)  # type: ignore[no-untyped-call]
    return out


def short_conv(x: Tensor, weight: Tensor) -> Tensor:
    """Depthwise causal convolution of width 4, then SiLU.

    Parameters
    ----------
    x : Tensor, shape (batch, tokens, channels)
    weight : Tensor, shape (channels, 4)
        The last column is the current token's.

    Returns
    -------
    Tensor, shape of `x`, type of `weight`
    """
    out: Tensor = _ShortConv.apply(x, weight.t())  # type: ignore[no-untyped-call]
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """Root-mean-square norm over the last axis, scaled by ``1 + weight``; the output is of `dtype`, if given."""
    out: Tensor = _RMSNorm.apply(x, x.new_empty(0, dtype=dtype or x.dtype), weight, 1.0, eps)  # type: ignore[no-untyped-call]
    return out


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, scaled by ``weight`` and ``silu(gate)``; of the gate's type."""
    out: Tensor = _RMSNorm.apply(x, gate, weight, 0.0, eps)  # type: ignore[no-untyped-call]
    return out


def swiglu(x: Tensor) -> Tensor:
    """``silu(first half) * second half`` of the last axis."""
    out: Tensor = _SwiGLU.apply(x)  # type: ignore[no-untyped-call]
    return out
