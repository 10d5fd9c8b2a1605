"""vLLM's own model classes, with taps where our connector is configured.

The subclass of each architecture in `ARCHITECTURES` is an attribute of this module under the architecture's name, made when
it is asked for: importing one model's file must not fail, or slow down, the others.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from tailreplay.engines.vllm import compat
from tailreplay.engines.vllm.adapters import ARCHITECTURES
from tailreplay.engines.vllm.plugin import install_taps


@cache
def tapped(name: str) -> type[Any]:
    """Return the subclass of an architecture's model class."""
    architecture = ARCHITECTURES[name]
    base: type[Any] = getattr(importlib.import_module(architecture.module), name)

    class Tapped(base):  # type: ignore[misc]
        # vLLM looks for these two names in the signature.
        def __init__(self, *, vllm_config: compat.VllmConfig, prefix: str = "") -> None:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            if compat.is_configured(vllm_config):
                compat.check_whole_hiddens(vllm_config)
                text = getattr(self, architecture.text) if architecture.text else self
                rows = vllm_config.scheduler_config.max_num_batched_tokens
                install_taps(self, text.model, architecture.adapter, compat.topology_of(vllm_config), rows)

    Tapped.__name__ = Tapped.__qualname__ = name
    Tapped.__doc__ = base.__doc__
    return Tapped


def __getattr__(name: str) -> type[Any]:
    if name in ARCHITECTURES:
        return tapped(name)
    raise AttributeError(name)
