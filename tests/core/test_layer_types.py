"""Layer types from the spellings that configs use."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tailreplay import Topology, UnsupportedModelError
from tailreplay.layer_types import layer_types_of

KIMI = {"kda_layers": [1, 2, 3, 5, 6], "full_attn_layers": [4, 7], "head_dim": 128}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, ["linear_attention", "full_attention"]),
        ({"layers_block_type": ["mamba", "attention", "moe"]}, ["mamba", "attention", "moe"]),
        ({"layer_types": None, "hybrid_override_pattern": "M-M*E"}, ["mamba", "mlp", "mamba", "attention", "moe"]),
        (
            {"linear_attn_config": KIMI, "num_hidden_layers": 7},
            [*["linear_attention"] * 3, "full_attention", *["linear_attention"] * 2, "full_attention"],
        ),
        # The lists of a checkpoint may name the layers of its draft model too.
        ({"linear_attn_config": KIMI, "num_hidden_layers": 4}, [*["linear_attention"] * 3, "full_attention"]),
    ],
)
def test_spellings(config: dict[str, Any], expected: list[str]) -> None:
    types = layer_types_of(SimpleNamespace(**config))
    assert types == expected
    assert Topology.from_layer_types(types).is_hybrid


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "llama"}, "'llama' does not name its layer types"),
        ({}, "does not name its layer types"),
        ({"hybrid_override_pattern": "M*?"}, r"unknown layers '\?'"),
        ({"linear_attn_config": KIMI, "num_hidden_layers": 9}, "each of the 9 layers"),
        (
            {"linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [2]}, "num_hidden_layers": 2},
            "in one of its two lists",
        ),
    ],
)
def test_configs_that_do_not_say(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words) as error:
        layer_types_of(SimpleNamespace(**config))
    assert "\n" not in str(error.value)
