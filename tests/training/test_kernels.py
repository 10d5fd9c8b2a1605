"""The kernels against their float64 oracles: values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from training.kernels import naive, ops
from training.kernels.build import missing_tools

pytestmark = pytest.mark.skipif(missing_tools() is not None, reason="no C++ compiler")


def delta_inputs(tokens: int, dim: int, heads: int = 2, batch: int = 2) -> tuple[Tensor, ...]:
    """Operands of the gated delta rule with horizons from one token to a few hundred."""
    torch.manual_seed(tokens + dim)
    mixed = torch.randn(batch, tokens, 3 * heads * dim, dtype=torch.float64)
    horizon = torch.exp(torch.rand(batch, tokens, heads, dtype=torch.float64) * 6)
    beta = torch.rand(batch, tokens, heads, dtype=torch.float64)
    return mixed, -1 / horizon, beta


CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[[], tuple[Tensor, ...]]]] = {
    # 70 tokens: two whole chunks of the kernel and a part.
    "delta-16": (ops.gated_delta, naive.gated_delta, lambda: delta_inputs(70, 16)),
    "delta-32": (ops.gated_delta, naive.gated_delta, lambda: delta_inputs(33, 32)),
    "delta-64": (ops.gated_delta, naive.gated_delta, lambda: delta_inputs(70, 64)),
    "conv": (ops.short_conv, naive.short_conv, lambda: (torch.randn(3, 9, 20), torch.randn(20, 4))),
    "conv of two tokens": (ops.short_conv, naive.short_conv, lambda: (torch.randn(2, 2, 20), torch.randn(20, 4))),
    "norm": (
        lambda x, w: ops.rms_norm(x, w, 1e-6),
        lambda x, w: naive.rms_norm(x, w, 1e-6),
        lambda: (torch.randn(5, 7, 24), torch.randn(24)),
    ),
    "gated norm": (
        lambda x, z, w: ops.gated_rms_norm(x, z, w, 1e-6),
        lambda x, z, w: naive.gated_rms_norm(x, z, w, 1e-6),
        lambda: (torch.randn(5, 7, 24), torch.randn(5, 7, 24), torch.randn(24)),
    ),
    "swiglu": (ops.swiglu, naive.swiglu, lambda: (torch.randn(3, 5, 40),)),
}


def run(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the output and the gradients of a fixed weighting of it, in float64."""
    leaves = [x.to(dtype).clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
    out.backward(torch.sin(weights * 50).to(dtype))
    return (out.detach().double(), *(leaf.grad.double() for leaf in leaves if leaf.grad is not None))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_values_and_gradients_are_those_of_the_oracle(name: str, dtype: torch.dtype, limit: float) -> None:
    fast, plain, make = CASES[name]
    torch.manual_seed(0)
    inputs = tuple(x.double() for x in make())
    expected = run(plain, inputs, torch.float64)
    found = run(fast, inputs, dtype)
    assert len(found) == len(expected) == len(inputs) + 1
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() / theirs.norm() < limit


def test_the_gated_delta_rule_passes_gradcheck() -> None:
    inputs = [x.requires_grad_() for x in delta_inputs(5, 16, heads=1, batch=1)]
    assert torch.autograd.gradcheck(ops.gated_delta, inputs, fast_mode=True)
    assert torch.autograd.gradcheck(naive.gated_delta, inputs, fast_mode=True)


def test_the_gated_delta_rule_is_the_librarys() -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    mixed, log_decay, beta = (x.float() for x in delta_inputs(150, 64))
    query, key, value = mixed.view(2, 150, 3, 2, 64).unbind(2)
    theirs, _ = torch_chunk_gated_delta_rule(query, key, value, g=log_decay, beta=beta, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(ops.gated_delta(mixed, log_decay, beta), theirs.flatten(2), rtol=1e-4, atol=1e-5)


def test_the_convolution_is_the_librarys() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 11, 32), torch.randn(32, 4)
    theirs = F.conv1d(x.transpose(1, 2), weight[:, None], padding=3, groups=32)[..., :11]
    torch.testing.assert_close(ops.short_conv(x, weight), F.silu(theirs).transpose(1, 2))
