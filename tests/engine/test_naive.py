"""The engine's states on the Qwen3.5 family against an independent float64 recurrence, computed from the weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tailreplay import HybridLM, PrefixCache, naive
from tailreplay.engines.transformers import compat
from tailreplay.engines.transformers.sequence import Sequence
from tailreplay.modes import parse_reuse
from tests.engine.tiny_models import random_ids, tiny_model

M = 203


def weights(module: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.detach().double().numpy() for name, tensor in module.named_parameters()}


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float, offset: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * (offset + weight)


class Oracle:
    """One Qwen3.5 linear layer in float64 numpy, token by token."""

    def __init__(self, layer: torch.nn.Module, config: object) -> None:
        self.w, self.c = weights(layer), config

    def __call__(self, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Map layer input (tokens, d) to (layer output, final state)."""
        w, c = self.w, self.c
        keys, values = c.linear_num_key_heads, c.linear_num_value_heads
        dk, dv, tokens = c.linear_key_head_dim, c.linear_value_head_dim, len(hidden)
        x = rms_norm(hidden, w["input_layernorm.weight"], c.rms_norm_eps, 1.0)
        mixed = x @ w["linear_attn.in_proj_qkv.weight"].T
        mixed = silu(naive.causal_conv1d(mixed, w["linear_attn.conv1d.weight"][:, 0]))
        q, k, v = np.split(mixed, [keys * dk, 2 * keys * dk], axis=-1)
        q, k = (t.reshape(tokens, keys, dk).repeat(values // keys, axis=1) for t in (q, k))
        v = v.reshape(tokens, values, dv)
        q, k = (t / np.sqrt((t**2).sum(-1, keepdims=True) + 1e-6) for t in (q, k))
        beta = sigmoid(x @ w["linear_attn.in_proj_b.weight"].T)
        dt = np.logaddexp(0, x @ w["linear_attn.in_proj_a.weight"].T + w["linear_attn.dt_bias"])
        log_decay = -np.exp(w["linear_attn.A_log"]) * dt
        state, out = None, []
        for i in range(tokens):
            state = naive.gated_delta_rule(*(t[i : i + 1] for t in (k, v, log_decay, beta)), initial=state)
            out.append(np.einsum("hk,hkv->hv", q[i] / np.sqrt(dk), state))
        z = (x @ w["linear_attn.in_proj_z.weight"].T).reshape(tokens, values, dv)
        core = rms_norm(np.stack(out), w["linear_attn.norm.weight"], c.rms_norm_eps, 0.0) * silu(z)
        hidden = hidden + core.reshape(tokens, -1) @ w["linear_attn.out_proj.weight"].T
        y = rms_norm(hidden, w["post_attention_layernorm.weight"], c.rms_norm_eps, 1.0)
        gated = silu(y @ w["mlp.gate_proj.weight"].T) * (y @ w["mlp.up_proj.weight"].T)
        return hidden + gated @ w["mlp.down_proj.weight"].T, state


@pytest.fixture(scope="module")
def lm() -> HybridLM:
    model = HybridLM(tiny_model("qwen3_5"), cache=PrefixCache("64MiB"))
    model.generate(random_ids(M + 1), max_new_tokens=1)
    return model


@pytest.mark.parametrize("tail", [M, 40])
def test_replayed_states_equal_the_recurrence(lm: HybridLM, tail: int) -> None:
    """Equation 1 from a zero state over the last k hiddens, for the whole prefix (exact) and for a part of it."""
    ids = random_ids(M + 1)
    plan = lm.cache.lookup(ids, lm.namespace(), parse_reuse("replay", tail / M, min_tokens=1), lm.backbone.topology)
    assert set(plan.tails) == {tail}
    sequence = Sequence(lm.backbone, lm.cache, lm.namespace(), M, store=False)
    sequence.restore(plan, ids)
    reader = lm.cache.fetch(plan)
    for group in lm.backbone.topology.groups:
        if group.stores_hidden:
            hidden = torch.empty(tail, lm.backbone.config.hidden_size)
            reader.hidden(lm.backbone.topology.stored_groups.index(group), M - tail, M, hidden)
        else:
            hidden = lm.backbone.embed(ids[M - tail : M])[0].detach()
        x = hidden.double().numpy()
        for layer in group.layers:
            x, expected = Oracle(lm.backbone.layers[layer], lm.backbone.config)(x)
            got = compat.states(sequence.past, layer)[1][0].double().numpy()
            assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < 1e-4
    lm.cache.release(plan)


def test_delta_rule_forgets_and_writes() -> None:
    """Writing twice under one key with full strength keeps the second value only; decay scales what is old."""
    key = np.array([[[1.0, 0.0]], [[1.0, 0.0]]])
    value = np.array([[[3.0]], [[5.0]]])
    one, zero = np.ones((2, 1)), np.zeros((2, 1))
    assert naive.gated_delta_rule(key, value, zero, one)[0].tolist() == [[5.0], [0.0]]
    faded = naive.gated_delta_rule(key[:1], value[:1], np.full((1, 1), -1.0), one[:1] * 0, np.ones((1, 2, 1)))
    assert np.allclose(faded, np.exp(-1.0))


def test_convolution_continues_from_its_left_context() -> None:
    rng = np.random.default_rng(0)
    inputs, weight = rng.normal(size=(9, 3)), rng.normal(size=(3, 4))
    whole = naive.causal_conv1d(inputs, weight)
    assert np.allclose(whole[5:], naive.causal_conv1d(inputs[5:], weight, left=inputs[2:5]))
