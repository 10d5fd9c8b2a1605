"""What every test begins with."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def denormals(request: pytest.FixtureRequest) -> None:
    """Give tests without a model their denormals back, which `HybridLM` lets its thread flush: hypothesis draws them."""
    torch = sys.modules.get("torch")
    if torch is not None and request.path.parent.name in ("core", "tiers", "vllm_plain"):
        torch.set_flush_denormal(False)
