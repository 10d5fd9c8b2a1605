"""Let a torchvision whose compiled operators do not load be imported anyway.

The CPU wheel of vLLM pulls a CUDA build of torchvision, whose extension cannot load beside a CPU build of torch. Importing
it then fails at the first fake kernel that it registers for an operator that is not there. vLLM needs the module, not its
operators.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Finder(MetaPathFinder):
    """Waits for torchvision's import, then drops registrations for operators that do not exist."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            _tolerate_missing_operators()
        return None  # only watching: the ordinary finders load the module


def _tolerate_missing_operators() -> None:
    import torch

    register = torch.library.register_fake

    def register_fake(op: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        if isinstance(op, str) and op.startswith("torchvision::") and not _exists(op):
            return lambda function: function
        kept: Callable[..., Any] = register(op, *args, **kwargs)
        return kept

    torch.library.register_fake = register_fake  # type: ignore[assignment]


def _exists(op: str) -> bool:
    import torch

    namespace, name = op.split("::")
    return hasattr(getattr(torch.ops, namespace), name)


def install() -> None:
    """Install the shim, once; without effect where torchvision is loaded already."""
    if "torchvision" not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
