"""Token-level prefix caching for hybrid LLMs, by replaying the tail of a cached prefix through the linear layers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Where each public name lives: loaded at first use, so that importing the package loads neither torch nor an engine.
_HOMES = {
    "PrefixCache": "tailreplay.cache",
    "HybridLM": "tailreplay.engines.transformers",
    "Namespace": "tailreplay.keys",
    "Ratio": "tailreplay.budget",
    "Exact": "tailreplay.budget",
    "Zero": "tailreplay.budget",
    "Adaptive": "tailreplay.budget",
    "Reuse": "tailreplay.modes",
    "Provenance": "tailreplay.provenance",
    "Storage": "tailreplay.storage",
    "Topology": "tailreplay.topology",
    "TailReplayError": "tailreplay.errors",
    "InvalidRequestError": "tailreplay.errors",
    "UnsupportedModelError": "tailreplay.errors",
    "CacheConfigError": "tailreplay.errors",
}

if TYPE_CHECKING:
    from tailreplay.budget import Adaptive, Exact, Ratio, Zero
    from tailreplay.cache import PrefixCache
    from tailreplay.engines.transformers import HybridLM
    from tailreplay.errors import CacheConfigError, InvalidRequestError, TailReplayError, UnsupportedModelError
    from tailreplay.keys import Namespace
    from tailreplay.modes import Reuse
    from tailreplay.provenance import Provenance
    from tailreplay.storage import Storage
    from tailreplay.topology import Topology

__all__ = [
    "Adaptive",
    "CacheConfigError",
    "Exact",
    "HybridLM",
    "InvalidRequestError",
    "Namespace",
    "PrefixCache",
    "Provenance",
    "Ratio",
    "Reuse",
    "Storage",
    "TailReplayError",
    "Topology",
    "UnsupportedModelError",
    "Zero",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'tailreplay' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value
