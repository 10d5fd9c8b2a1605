"""Slow, plain recurrences in float64: the oracles that fast paths are checked against.

Each is one line of mathematics a token. They know no chunks, no kernels and no cache, so an error in those cannot hide.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def gated_delta_rule(key: Array, value: Array, log_decay: Array, beta: Array, initial: Array | None = None) -> Array:
    """Gated DeltaNet state after all tokens, by its recurrence.

    ``S_i = alpha_i (I - beta_i k_i k_i^T) S_{i-1} + beta_i k_i v_i^T`` with ``alpha_i = exp(log_decay_i)``: the state of
    DESIGN's equation 1, transposed as engines keep it (key by value).

    Parameters
    ----------
    key : ndarray, shape (tokens, heads, key_dim)
        L2-normalised.
    value : ndarray, shape (tokens, heads, value_dim)
    log_decay, beta : ndarray, shape (tokens, heads)
        Log of the forget gate (at most 0), and the write strength.
    initial : ndarray, shape (heads, key_dim, value_dim), optional
        State before the first token; zero if not given.

    Returns
    -------
    ndarray, shape (heads, key_dim, value_dim), float64
    """
    return gated_delta_outputs(key, key, value, log_decay, beta, initial)[1]


def gated_delta_outputs(
    query: Array, key: Array, value: Array, log_decay: Array, beta: Array, initial: Array | None = None
) -> tuple[Array, Array]:
    """Gated DeltaNet output of every token, ``S_i^T q_i``, and the state after all of them.

    Parameters
    ----------
    query : ndarray, shape (tokens, heads, key_dim)
        L2-normalised and scaled.
    key, value, log_decay, beta, initial : ndarray
        As in `gated_delta_rule`.

    Returns
    -------
    outputs : ndarray, shape (tokens, heads, value_dim), float64
    state : ndarray, shape (heads, key_dim, value_dim), float64
    """
    tokens, heads, key_dim = key.shape
    state = np.zeros((heads, key_dim, value.shape[-1])) if initial is None else initial.astype(np.float64)
    outputs = np.zeros(value.shape)
    for i in range(tokens):
        decayed = np.exp(log_decay[i])[:, None, None] * state
        recalled = np.einsum("hk,hkv->hv", key[i], decayed)
        correction = beta[i][:, None] * (value[i] - recalled)
        state = decayed + np.einsum("hk,hv->hkv", key[i], correction)
        outputs[i] = np.einsum("hk,hkv->hv", query[i], state)
    return outputs, state


def forget_gates(
    step: Array, rate_log: Array, bias: Array, limits: tuple[float, float] = (0.0, math.inf)
) -> NDArray[np.float64]:
    """Log of each token's forget gate, ``-exp(A_log) * softplus(step + dt_bias)``: Gated DeltaNet's, KDA's and Mamba-2's.

    Parameters
    ----------
    step : ndarray, shape (tokens, ...)
        What the layer computes from each token.
    rate_log, bias : ndarray
        ``A_log`` and ``dt_bias``, in shapes that broadcast to a token's.
    limits : (float, float)
        Least and greatest softplus (Mamba-2's time step).
    """
    softplus = np.logaddexp(0.0, step.astype(np.float64) + bias)
    gates: NDArray[np.float64] = -np.exp(rate_log.astype(np.float64)) * np.clip(softplus, *limits)
    return gates


def causal_conv1d(inputs: Array, weight: Array, left: Array | None = None) -> Array:
    """Depthwise causal convolution without bias or activation.

    Parameters
    ----------
    inputs : ndarray, shape (tokens, channels)
    weight : ndarray, shape (channels, width)
    left : ndarray, shape (width - 1, channels), optional
        Inputs before the first token; zero if not given.

    Returns
    -------
    ndarray, shape (tokens, channels), float64
    """
    tokens, channels = inputs.shape
    width = weight.shape[1]
    before = np.zeros((width - 1, channels)) if left is None else left
    padded = np.concatenate([before, inputs]).astype(np.float64)
    return np.stack([(padded[i : i + width] * weight.T).sum(0) for i in range(tokens)])
