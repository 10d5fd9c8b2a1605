"""vLLM's own model classes, with taps where our connector is configured."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.qwen3_5 import (
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
)
from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM

from tailreplay.engines.vllm import compat
from tailreplay.engines.vllm.plugin import install_taps


def _tap(owner: Any, text_model: Any, vllm_config: compat.VllmConfig) -> None:
    if compat.is_configured(vllm_config):
        rows = vllm_config.scheduler_config.max_num_batched_tokens
        install_taps(owner, text_model.model, compat.topology_of(vllm_config), rows)


class Qwen3_5(Qwen3_5ForCausalLM):  # type: ignore[misc]
    """Dense Qwen3.5."""

    def __init__(self, *, vllm_config: compat.VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        _tap(self, self, vllm_config)


class Qwen3_5Moe(Qwen3_5MoeForCausalLM):  # type: ignore[misc]
    """Qwen3.5 with experts."""

    def __init__(self, *, vllm_config: compat.VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        _tap(self, self, vllm_config)


class Qwen3Next(Qwen3NextForCausalLM):  # type: ignore[misc]
    """Qwen3-Next."""

    def __init__(self, *, vllm_config: compat.VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        _tap(self, self, vllm_config)


class Qwen3_5Vision(Qwen3_5ForConditionalGeneration):  # type: ignore[misc]
    """Dense Qwen3.5 with its vision part, as the hub's checkpoints are."""

    def __init__(self, *, vllm_config: compat.VllmConfig, prefix: str = "model") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        _tap(self, self.language_model, vllm_config)


class Qwen3_5MoeVision(Qwen3_5MoeForConditionalGeneration):  # type: ignore[misc]
    """Qwen3.5 with experts and its vision part."""

    def __init__(self, *, vllm_config: compat.VllmConfig, prefix: str = "model") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        _tap(self, self.language_model, vllm_config)
