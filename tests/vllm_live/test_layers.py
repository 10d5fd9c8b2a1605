"""Subclasses of vLLM's models, and adapters on its own ``forward`` of layers whose mixers need a GPU, with other mixers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tailreplay.engines.vllm import compat, models
from tailreplay.engines.vllm.adapters import ARCHITECTURES
from tailreplay.engines.vllm.compat.geometry import stages_of
from tailreplay.errors import CacheConfigError, UnsupportedModelError
from tests.vllm_plain import fake_layers as fake
from tests.vllm_plain.test_adapters import IDS, L, Style, replay_all, run


@pytest.fixture(scope="module", autouse=True)
def _engines_can_start_afterwards() -> Iterator[None]:
    """Kimi's model file imports numba, on whose bindings vLLM's search for kernels among all modules trips."""
    yield
    sys.modules.pop("llvmlite.binding.ffi", None)


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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_has_its_subclass(architecture: str) -> None:
    subclass = getattr(models, architecture)
    assert subclass is getattr(models, architecture)
    assert subclass.__bases__[0].__name__ == subclass.__name__ == architecture


def test_other_names_are_not_there() -> None:
    assert not hasattr(models, "LlamaForCausalLM")


@pytest.mark.parametrize(("ranks", "switch", "refused"), [(2, True, True), (1, True, False), (2, None, False)])
def test_hiddens_divided_between_ranks_are_refused(ranks: int, switch: bool | None, refused: bool) -> None:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        compilation_config=SimpleNamespace(
            pass_config=SimpleNamespace() if switch is None else SimpleNamespace(enable_sp=switch)
        ),
    )
    if refused:
        with pytest.raises(UnsupportedModelError, match="without sequence parallelism"):
            compat.check_whole_hiddens(config)
    else:
        compat.check_whole_hiddens(config)


def test_stages_follow_vllms_borders(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(layer_types=[L, L, L, "full_attention"] * 2)),
        parallel_config=SimpleNamespace(pipeline_parallel_size=2),
    )
    assert [stage.first for stage in stages_of(config)] == [0, 4]
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "5,3")
    assert [group.layers for stage in stages_of(config) for group in stage.groups] == [(0, 1, 2), (4,), (5, 6)]
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "2,6")
    with pytest.raises(CacheConfigError, match="full-attention layer in every pipeline stage"):
        stages_of(config)
