"""Ways of running vLLM that are refused at start, in one sentence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tailreplay.engines.vllm import compat, models
from tailreplay.engines.vllm.adapters import ARCHITECTURES
from tailreplay.errors import CacheConfigError, UnsupportedModelError


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


@pytest.mark.parametrize(("ranks", "switch", "refused"), [(2, True, True), (1, True, False), (2, None, False)])
def test_hiddens_divided_between_ranks_are_refused(ranks: int, switch: bool | None, refused: bool) -> None:
    passes = SimpleNamespace() if switch is None else SimpleNamespace(enable_sp=switch)
    given = config(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        compilation_config=SimpleNamespace(pass_config=passes),
    )
    if refused:
        with pytest.raises(UnsupportedModelError, match="without sequence parallelism"):
            compat.check_whole_hiddens(given)
    else:
        compat.check_whole_hiddens(given)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_has_its_class_here(architecture: str) -> None:
    subclass = getattr(models, architecture)
    assert subclass is getattr(models, architecture)
    assert subclass.__bases__[0].__name__ == subclass.__name__ == architecture


def test_other_names_are_not_there() -> None:
    assert not hasattr(models, "LlamaForCausalLM")
