"""A Qwen3.5 hybrid whose parameters are transformers' own and whose forward pass is ours, by the fused kernels.

The module is a plain ``Qwen3_5ForCausalLM``, so its weights load unchanged wherever that class loads. `Hybrid.forward`
computes the same numbers several times faster on a CPU, and can also *cut* a sequence at a boundary, for ablations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.kernels import ops
from training.settings import ModelSettings

LINEAR, ATTENTION = "linear_attention", "full_attention"


@dataclass(frozen=True)
class Cut:
    """What is lost at a boundary inside a sequence: the tokens after it run as after a cache hit that kept the rest.

    Attributes
    ----------
    at : int
        First token after the boundary.
    states : bool
        The linear layers' recurrent and convolution states are zero there (the "zero" baseline).
    kv : bool
        The attention layers' keys and values of all earlier tokens are gone (the KV-wipe ablation).
    """

    at: int
    states: bool = False
    kv: bool = False


def library_model(settings: ModelSettings) -> Any:
    """Return a ``Qwen3_5ForCausalLM`` of these sizes, in float32, with the library's own initialisation."""
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        vocab_size=settings.vocabulary,
        hidden_size=settings.hidden,
        intermediate_size=settings.feed_forward,
        num_hidden_layers=len(settings.layers),
        layer_types=[LINEAR if kind == "L" else ATTENTION for kind in settings.layers],
        num_attention_heads=settings.query_heads,
        num_key_value_heads=settings.kv_heads,
        head_dim=settings.head_dim,
        linear_num_key_heads=settings.delta_heads,
        linear_num_value_heads=settings.delta_heads,
        linear_key_head_dim=settings.delta_dim,
        linear_value_head_dim=settings.delta_dim,
        max_position_embeddings=settings.max_positions,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": settings.rope_theta,
            "partial_rotary_factor": settings.rotary_share,
        },
        tie_word_embeddings=True,
        eos_token_id=0,
        pad_token_id=1,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.tie_weights()
    return model


class Hybrid:
    """The fast forward pass over a library model's parameters.

    Parameters
    ----------
    model : Qwen3_5ForCausalLM
        Any with equal numbers of key and value heads, and equal head dims, in its linear layers.
    dtype : torch.dtype
        Type of the matrix products' operands: bfloat16 runs twice as fast. All else is float32.
    """

    def __init__(self, model: Any, dtype: torch.dtype = torch.float32) -> None:
        self.model = model
        self.dtype = dtype
        self.config = model.config
        self.eps = float(self.config.rms_norm_eps)
        rope = self.config.rope_parameters
        dim = int(self.config.head_dim * rope["partial_rotary_factor"])
        self.frequencies = rope["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by the name that the library gives them; the tied head is the embedding's."""
        return dict(self.model.named_parameters())

    def logits(self, ids: Tensor, select: Tensor | None = None, cut: Cut | None = None) -> Tensor:
        """Return next-token logits.

        Parameters
        ----------
        ids : Tensor, shape (batch, tokens), int64
        select : Tensor, shape (chosen,), int64, optional
            Indices into the flattened tokens; all of them if not given.
        cut : Cut, optional

        Returns
        -------
        Tensor, shape (chosen, vocabulary)
        """
        body = self.model.model
        x = F.embedding(ids, body.embed_tokens.weight)
        angles = torch.arange(ids.shape[1], dtype=torch.float32)[:, None] * self.frequencies
        rotary = torch.cat([angles, angles], -1)
        turn = (rotary.cos(), rotary.sin())
        for layer in body.layers:
            h = ops.rms_norm(x, layer.input_layernorm.weight, self.eps, self.dtype)
            if hasattr(layer, "linear_attn"):
                x = x + self._linear(layer.linear_attn, h, cut)
            else:
                x = x + self._attention(layer.self_attn, h, turn, cut)
            h = ops.rms_norm(x, layer.post_attention_layernorm.weight, self.eps, self.dtype)
            both = self._project(h, layer.mlp.gate_proj, layer.mlp.up_proj)
            x = x + self._project(ops.swiglu(both), layer.mlp.down_proj)
        x = x.flatten(0, 1)
        if select is not None:
            x = x.index_select(0, select)
        return self._project(ops.rms_norm(x, body.norm.weight, self.eps, self.dtype), body.embed_tokens).float()

    def _project(self, x: Tensor, *layers: Any) -> Tensor:
        """Products with several layers' weights as one: small ones are slow."""
        weights = [layer.weight for layer in layers]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        return F.linear(x, weight.to(self.dtype))

    def _linear(self, mixer: Any, h: Tensor, cut: Cut | None) -> Tensor:
        if cut is not None and cut.states:
            parts = [self._linear(mixer, part, None) for part in (h[:, : cut.at], h[:, cut.at :])]
            return torch.cat(parts, 1)
        heads = mixer.num_v_heads
        layers = (mixer.in_proj_qkv, mixer.in_proj_z, mixer.in_proj_b, mixer.in_proj_a)
        mixed, gate, strength, decay = self._project(h, *layers).split([w.weight.shape[0] for w in layers], -1)
        log_decay = -mixer.A_log.exp() * F.softplus(decay.float() + mixer.dt_bias)
        mixed = ops.short_conv(mixed, mixer.conv1d.weight[:, 0])
        out = ops.gated_delta(mixed, log_decay, strength.float().sigmoid())
        batch, tokens, _ = out.shape
        by_head = (batch, tokens, heads, mixer.head_v_dim)
        out = ops.gated_rms_norm(out.view(by_head), gate.reshape(by_head), mixer.norm.weight, self.eps)
        return self._project(out.flatten(2), mixer.out_proj)

    def _attention(self, mixer: Any, h: Tensor, turn: tuple[Tensor, Tensor], cut: Cut | None) -> Tensor:
        batch, tokens, _ = h.shape
        dim = mixer.head_dim
        layers = (mixer.q_proj, mixer.k_proj, mixer.v_proj)
        query, key, value = self._project(h, *layers).split([w.weight.shape[0] for w in layers], -1)
        query, gate = query.unflatten(-1, (-1, 2, dim)).unbind(-2)
        query = rotate(ops.rms_norm(query.float(), mixer.q_norm.weight, self.eps), turn)
        key = rotate(ops.rms_norm(key.unflatten(-1, (-1, dim)).float(), mixer.k_norm.weight, self.eps), turn)
        query, key = query.to(self.dtype).transpose(1, 2), key.to(self.dtype).transpose(1, 2)
        value = value.unflatten(-1, (-1, dim)).transpose(1, 2)
        if cut is not None and cut.kv:
            pairs = [
                F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                for q, k, v in zip(*(split(x, cut.at) for x in (query, key, value)), strict=True)
            ]
            out = torch.cat(pairs, 2)
        else:
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        out = out.transpose(1, 2) * gate.sigmoid()
        return self._project(out.reshape(batch, tokens, -1), mixer.o_proj)


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of the first channels of `x`, shape (batch, tokens, heads, dim)."""
    cos, sin = (part[:, None] for part in turn)
    dim = cos.shape[-1]
    moved, rest = x[..., :dim], x[..., dim:]
    first, second = moved.chunk(2, -1)
    return torch.cat([moved * cos + torch.cat([-second, first], -1) * sin, rest], -1)


def split(x: Tensor, at: int) -> tuple[Tensor, Tensor]:
    """Tokens before and from `at` on, of (batch, heads, tokens, dim)."""
    return x[:, :, :at], x[:, :, at:]
