"""Tiny models of every supported family, with slow decay so that forgetting cannot hide an error."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import transformers as hf
from transformers import AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 97

_BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "head_dim": 16,
    "num_hidden_layers": 8,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_d_head": 16, "mamba_expand": 2, "mamba_chunk_size": 16}
_L, _F = "linear_attention", "full_attention"

CONFIGS: dict[str, Callable[[], hf.PretrainedConfig]] = {
    "qwen3_5": lambda: hf.Qwen3_5TextConfig(**_BASE, **_DELTA),
    "qwen3_5_moe": lambda: hf.Qwen3_5MoeTextConfig(**_BASE, **_DELTA, **_EXPERTS),
    "qwen3_next": lambda: hf.Qwen3NextConfig(**_BASE, **_DELTA, **_EXPERTS),
    "olmo_hybrid": lambda: hf.OlmoHybridConfig(
        **_BASE,
        num_hidden_layers=8,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=12,
        linear_value_head_dim=24,
    ),
    "kimi_linear": lambda: hf.KimiLinearConfig(
        **{**_BASE, "num_key_value_heads": 4},
        num_hidden_layers=8,
        layer_types=[_L, _L, _L, _F] * 2,
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        linear_num_heads=4,
        linear_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_group=1,
        topk_group=1,
    ),
    "granitemoehybrid": lambda: hf.GraniteMoeHybridConfig(
        **_BASE,
        **_MAMBA,
        num_hidden_layers=7,
        layer_types=[_L, _L, _F, _L, _F, _L, _L],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=64,
        embedding_multiplier=3.0,
        residual_multiplier=0.7,
    ),
    "nemotron_h": lambda: hf.NemotronHConfig(
        **_BASE,
        head_dim=16,
        layers_block_type=[_L, "mlp", _L, _F, "moe", _L, "mlp", _F, "mlp", _L, _L, "moe"],
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=2,
        chunk_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
        n_group=1,
        topk_group=1,
    ),
    "bamba": lambda: hf.BambaConfig(**_BASE, **_MAMBA, num_hidden_layers=6, attn_layer_indices=[2, 4]),
    "lfm2": lambda: hf.Lfm2Config(
        **_BASE, num_hidden_layers=7, layer_types=["conv", "conv", _F, "conv", "conv", _F, "conv"]
    ),
}


@cache
def tiny_model(name: str, seed: int = 0) -> PreTrainedModel:
    """Return a model of the family, float32, eval mode. Shared between tests: do not change it."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]())
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.12)
        elif parameter_name.endswith("A_log"):
            # With dt around softplus(0) this forgets over some 30 to 1,500 tokens; the default forgets in a few.
            parameter.data.uniform_(0.001, 0.05).log_()
        elif parameter_name.endswith("dt_bias"):
            parameter.data.zero_()
    model.generation_config = None
    return model.eval()


def random_ids(count: int, seed: int = 0) -> list[int]:
    """Return `count` token ids that are no special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return ||a - b|| / ||b||."""
    return float((a.double() - b.double()).norm() / (b.double().norm() + 1e-30))
