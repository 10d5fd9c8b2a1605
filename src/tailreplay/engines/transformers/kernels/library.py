"""The kernels behind the library's own signatures: what they do not know goes to the library's function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tailreplay.engines.transformers.kernels.gated_delta import gated_delta_chunks, gated_delta_step
from tailreplay.engines.transformers.kernels.short_conv import causal_conv

Function = Callable[..., Any]
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A step over a state of fewer elements costs what its calls cost, and the library's step makes no more of them.
_LARGE_STATE = 1 << 16
_ACTIVATIONS: dict[str | None, Function | None] = {
    None: None,
    "silu": torch.nn.functional.silu,
    "swish": torch.nn.functional.silu,
}


def chunk_rule(fallback: Function) -> Function:
    """Return a stand-in for ``torch_chunk_gated_delta_rule``."""

    def rule(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **given: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        initial = given.get("initial_state")
        if not _known_rule(query, key, value, g, beta, initial, given) or "chunk_size" in given:
            result: tuple[torch.Tensor, torch.Tensor | None] = fallback(query, key, value, g=g, beta=beta, **given)
            return result
        query, key = _per_value_head(query, key, value)
        output, state = gated_delta_chunks(query, key, value, g, beta, initial)
        return output, state if given.get("output_final_state") else None

    return rule


def step_rule(fallback: Function, least: int = _LARGE_STATE) -> Function:
    """Return a stand-in for ``torch_recurrent_gated_delta_rule``, for one token after a state of `least` elements."""

    def rule(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **given: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        initial = given.get("initial_state")
        known = _known_rule(query, key, value, g, beta, initial, given)
        if not known or initial is None or initial.numel() < least or key.shape[1] != 1:
            result: tuple[torch.Tensor, torch.Tensor | None] = fallback(query, key, value, g=g, beta=beta, **given)
            return result
        query, key = _per_value_head(query, key, value)
        output, state = gated_delta_step(query, key, value, g, beta, initial)
        return output, state if given.get("output_final_state") else None

    return rule


def convolution(fallback: Function) -> Function:
    """Return a stand-in for ``causal_conv1d_fn``."""

    def convolve(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **given: Any,
    ) -> torch.Tensor:
        tensors = [hidden_states, weight] if bias is None else [hidden_states, weight, bias]
        known = (
            _plain(*tensors)
            and hidden_states.dim() == 3
            and len({tensor.dtype for tensor in tensors}) == 1
            and activation in _ACTIVATIONS
            and given.get("seq_idx") is None
            and hidden_states.shape[2] > 0
        )
        if not known:
            result: torch.Tensor = fallback(hidden_states, weight, bias, activation=activation, **given)
            return result
        output = causal_conv(hidden_states, weight, bias)
        activate = _ACTIVATIONS[activation]
        return output if activate is None else activate(output, inplace=True)

    return convolve


def _known_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial: torch.Tensor | None,
    given: dict[str, Any],
) -> bool:
    tensors = [query, key, value, g, beta] if initial is None else [query, key, value, g, beta, initial]
    if not _plain(*tensors) or not query.dim() == key.dim() == value.dim() == 4 or not g.dim() == beta.dim() == 3:
        return False
    batch, tokens, heads, _ = value.shape
    return (
        query.shape == key.shape
        and key.shape[:2] == (batch, tokens)
        and g.shape == beta.shape == (batch, tokens, heads)
        and heads % key.shape[2] == 0
        and tokens > 0
        and (initial is None or initial.shape == (batch, heads, key.shape[3], value.shape[3]))
        and bool(given.get("use_qk_l2norm_in_kernel"))
        and given.get("cu_seqlens") is None
        and given.get("seq_idx") is None
    )


def _plain(*tensors: torch.Tensor) -> bool:
    """Whether these are CPU tensors of known dtypes, and no gradient or traced program is wanted."""
    return (
        all(tensor.device.type == "cpu" and tensor.dtype in _DTYPES for tensor in tensors)
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
        and not torch.compiler.is_compiling()
    )


def _per_value_head(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Repeat queries and keys that serve several value heads: newer library versions leave that to the function."""
    repeats = value.shape[2] // key.shape[2]
    if repeats == 1:
        return query, key
    return query.repeat_interleave(repeats, dim=2), key.repeat_interleave(repeats, dim=2)
