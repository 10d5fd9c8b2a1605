"""Adapters on vLLM's own ``forward`` of layers whose mixers need a GPU, with parts that do not."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from tests.vllm_plain import fake_layers as fake
from tests.vllm_plain.test_adapters import IDS, L, Style, replay_all, run


def olmo() -> type[fake.Layer]:
    from vllm.model_executor.models.olmo_hybrid import OlmoHybridDecoderLayer

    class Attention(fake.Mixer):
        def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return self.mix(hidden_states)

    class Olmo(fake.Olmo):
        forward = OlmoHybridDecoderLayer.forward

        def __init__(self, kind: str) -> None:
            super().__init__(kind)
            self.layer_type = kind
            self.self_attn, self.post_feedforward_layernorm = Attention(False), fake.Norm()

    return Olmo


def kimi(module: str, methods: tuple[str, ...], switches: tuple[str, ...]) -> type[fake.Layer]:
    layer = importlib.import_module(module).KimiDecoderLayer
    borrowed: dict[str, Any] = {name: getattr(layer, name) for name in ("forward", "_run_self_attn", *methods)}
    return type("Kimi", (fake.Kimi,), {**borrowed, **dict.fromkeys(switches, False)})


LAYERS = {
    "olmo": ("OlmoHybridForCausalLM", olmo),
    "kimi": (
        "KimiLinearForCausalLM",
        lambda: kimi(
            "vllm.models.kimi_k3.nvidia.model",
            ("_pre_attn_norm", "_post_attn_norm"),
            ("use_attn_res", "use_sequence_parallel"),
        ),
    ),
    "kimi-amd": (
        "KimiLinearForCausalLM",
        lambda: kimi("vllm.models.kimi_k3.amd.linear", (), ("use_attn_residuals",)),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_replay_gives_mixers_what_vllms_layers_give_them(name: str) -> None:
    architecture, make = LAYERS[name]
    style = Style(architecture, make())
    (stage,) = run(style, [(0, len(style.types))])
    replay_all(stage.model)
    for layer in stage.layers:
        if layer.kind == L:
            forward, replayed = layer.seen
            assert forward.shape == (len(IDS), fake.WIDTH)
            assert torch.allclose(forward, replayed, atol=1e-5)
