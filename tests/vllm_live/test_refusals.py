"""Ways of running vLLM that are refused at start, in one sentence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tailreplay.engines.vllm import compat
from tailreplay.errors import CacheConfigError


def cache(mamba_cache_mode: str = "none", use_replayssm: bool = False) -> SimpleNamespace:
    return SimpleNamespace(mamba_cache_mode=mamba_cache_mode, use_replayssm=use_replayssm)


def parallel(decode: int = 1, prefill: int = 1, data: int = 1) -> SimpleNamespace:
    return SimpleNamespace(
        decode_context_parallel_size=decode, prefill_context_parallel_size=prefill, data_parallel_size=data
    )


def config(**changed: Any) -> Any:
    """The part of vLLM's configuration that is looked at before the cache's layout."""
    values = {
        "speculative_config": None,
        "cache_config": cache(),
        "parallel_config": parallel(),
        "lora_config": None,
        "model_config": SimpleNamespace(is_moe=True),
    }
    return SimpleNamespace(**{**values, **changed})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"speculative_config": object()}, "speculative decoding"),
        ({"cache_config": cache("all")}, "mamba cache mode 'all'"),
        ({"cache_config": cache(use_replayssm=True)}, "--use-replayssm"),
        ({"lora_config": object()}, "LoRA"),
        ({"parallel_config": parallel(data=2)}, "data parallelism"),
        ({"parallel_config": parallel(decode=2)}, "context parallelism"),
        ({"parallel_config": parallel(prefill=2)}, "context parallelism"),
        ({}, "one group of attention layers in vLLM, this model has 0"),
    ],
)
def test_what_is_not_supported_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(CacheConfigError, match=message) as error:
        compat.geometry(config(**changed), SimpleNamespace(kv_cache_groups=[]))
    assert "\n" not in str(error.value)
