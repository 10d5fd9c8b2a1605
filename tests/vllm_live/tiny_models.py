"""Tiny models of every architecture, in shapes that vLLM's CPU kernels take, saved as checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf

BUNDLED = Path(__file__).parents[2] / "src" / "tailreplay" / "bundled"
VOCABULARY = 1024

_BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "head_dim": 64,
    "num_hidden_layers": 8,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
_L, _F = "linear_attention", "full_attention"
_VISION = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 128,
    "num_position_embeddings": 16,
}

CONFIGS: dict[str, Callable[[], hf.PretrainedConfig]] = {
    "Qwen3_5ForCausalLM": lambda: hf.Qwen3_5TextConfig(**_BASE, **_DELTA),
    "Qwen3_5MoeForCausalLM": lambda: hf.Qwen3_5MoeTextConfig(**_BASE, **_DELTA, **_EXPERTS),
    "Qwen3NextForCausalLM": lambda: hf.Qwen3NextConfig(**_BASE, **_DELTA, **_EXPERTS),
    "Qwen3_5ForConditionalGeneration": lambda: hf.Qwen3_5Config(
        text_config={**_BASE, **_DELTA}, vision_config=_VISION, tie_word_embeddings=False
    ),
    "Qwen3_5MoeForConditionalGeneration": lambda: hf.Qwen3_5MoeConfig(
        text_config={**_BASE, **_DELTA, **_EXPERTS}, vision_config=_VISION, tie_word_embeddings=False
    ),
    "OlmoHybridForCausalLM": lambda: hf.OlmoHybridConfig(
        **_BASE, **{key: value for key, value in _DELTA.items() if key != "head_dim"}
    ),
    "KimiLinearForCausalLM": lambda: hf.KimiLinearConfig(
        **{**_BASE, "num_key_value_heads": 4},
        num_hidden_layers=8,
        layer_types=[_L, _L, _L, _F] * 2,
        kv_lora_rank=64,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
        linear_num_heads=2,
        linear_head_dim=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        n_group=1,
        topk_group=1,
    ),
    "GraniteMoeHybridForCausalLM": lambda: hf.GraniteMoeHybridConfig(
        **_BASE,
        mamba_n_heads=4,
        mamba_d_state=64,
        mamba_d_head=64,
        mamba_expand=2,
        mamba_chunk_size=64,
        num_hidden_layers=7,
        layer_types=[_L, _L, _F, _L, _F, _L, _L],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=64,
        embedding_multiplier=3.0,
        residual_multiplier=0.7,
        attention_multiplier=0.2,
    ),
    "NemotronHForCausalLM": lambda: hf.NemotronHConfig(
        **_BASE,
        head_dim=64,
        layers_block_type=[_L, "mlp", _L, _F, "mlp", _L, "mlp", _F, "mlp", _L, _L, "mlp"],
        mamba_num_heads=4,
        mamba_head_dim=64,
        ssm_state_size=64,
        n_groups=2,
        chunk_size=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        moe_shared_expert_intermediate_size=64,
        n_group=1,
        topk_group=1,
    ),
}


def save(architecture: str, folder: Path) -> None:
    """Write a checkpoint with random weights whose states decay slowly, so that forgetting cannot hide an error."""
    torch.manual_seed(0)
    config = CONFIGS[architecture]()
    model: Any = getattr(hf, architecture)(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.08)
        elif name.endswith("A_log"):
            parameter.data.uniform_(0.001, 0.05).log_()
        elif name.endswith("dt_bias"):
            parameter.data.zero_()
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(BUNDLED / name, folder / name)
    if hasattr(config, "vision_config"):
        # vLLM asks for both even where it is told to run the language model only.
        hf.Qwen2VLImageProcessor().save_pretrained(folder)
        hf.Qwen3VLVideoProcessor().save_pretrained(folder)
