"""Models with random weights in the shape of real ones, for speed: no download, and quality is not their business."""

from __future__ import annotations

from typing import Any

import torch

from tailreplay import torchvision_shim

torchvision_shim.install()  # before transformers is asked for a model that wants torchvision

from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    OlmoHybridConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
)

VOCABULARY = 4096
"""Small, to keep the embedding out of the way; everything else is the real model's."""

_LONGEST = 1 << 18
_LINEAR = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        **_LINEAR,
    },
    "qwen3.5-4b": {
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        **_LINEAR,
    },
    "qwen3.6-27b": {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        **_LINEAR,
    },
    "olmo-hybrid-7b": {
        "hidden_size": 3840,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 30,
        "num_key_value_heads": 30,
        "linear_num_key_heads": 30,
        "linear_num_value_heads": 30,
        "linear_key_head_dim": 96,
        "linear_value_head_dim": 192,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "vocab_size": 512,
    },
}
SHAPES = tuple(_SHAPES)


def shape_config(shape: str) -> PretrainedConfig:
    """Return the config of a named shape: three linear layers, then one of full attention, and so on."""
    kind = OlmoHybridConfig if shape.startswith("olmo") else Qwen3_5TextConfig
    given = {"vocab_size": VOCABULARY, "max_position_embeddings": _LONGEST, **_SHAPES[shape]}
    # The real models' special tokens may lie past the small vocabulary.
    config: PretrainedConfig = kind(**given, eos_token_id=None, pad_token_id=None)
    return config


def random_model(
    shape: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0, device: str | torch.device = "cpu"
) -> PreTrainedModel:
    """Build a model of a named shape.

    Decay is set slow (horizons of some 30 to 1,500 tokens): the library's default initialisation forgets in a few
    tokens and fills the states with denormals, which are slow to compute with.
    """
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shape_config(shape), dtype=dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data.uniform_(0.001, 0.05).log_()
        elif name.endswith("dt_bias"):
            parameter.data.zero_()
    return model.eval()
