"""Models with random weights in the shape of real ones, for speed: no download, and quality is not their business."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3_5TextConfig

# A small vocabulary keeps the embedding out of the way; everything else is the real model's.
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
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 4096,
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


def random_model(shape: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> PreTrainedModel:
    """Build a model of a named shape on CPU.

    Decay is set slow (horizons of some 30 to 1,500 tokens): the library's default initialisation forgets in a few
    tokens and fills the states with denormals, which are slow to compute with.
    """
    torch.manual_seed(seed)
    config = Qwen3_5TextConfig(**_SHAPES[shape], max_position_embeddings=1 << 18)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data.uniform_(0.001, 0.05).log_()
        elif name.endswith("dt_bias"):
            parameter.data.zero_()
    return model.eval()
