"""Ways of running vLLM that are refused at start, in one sentence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tailreplay.engines.vllm import compat
from tailreplay.errors import CacheConfigError


def config(**changed: Any) -> Any:
    """The part of vLLM's configuration that is looked at before the cache's layout."""
    values = {
        "speculative_config": None,
        "cache_config": SimpleNamespace(mamba_cache_mode="none"),
        "parallel_config": SimpleNamespace(world_size=1),
    }
    return SimpleNamespace(**{**values, **changed})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"speculative_config": object()}, "speculative decoding"),
        ({"cache_config": SimpleNamespace(mamba_cache_mode="align")}, "--no-enable-prefix-caching"),
        ({"parallel_config": SimpleNamespace(world_size=2)}, "one rank"),
        ({}, "one group of attention layers in vLLM, this model has 0"),
    ],
)
def test_what_is_not_supported_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(CacheConfigError, match=message) as error:
        compat.geometry(config(**changed), SimpleNamespace(kv_cache_groups=[]))
    assert "\n" not in str(error.value)
