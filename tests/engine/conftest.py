"""Models shared by the engine's tests."""

from __future__ import annotations

import pytest

from tailreplay import HybridLM, PrefixCache
from tailreplay.storage import Storage
from tests.engine.tiny_models import tiny_model


@pytest.fixture(scope="session")
def bundled() -> HybridLM:
    """The bundled model. Its cache is shared by the session: use a salt of your own."""
    return HybridLM.from_pretrained("bundled", cache=PrefixCache("128MiB"))


@pytest.fixture
def tiny() -> HybridLM:
    """A tiny Qwen3.5 without tokenizer, with a fresh cache."""
    return HybridLM(tiny_model("qwen3_5"), cache=PrefixCache("32MiB"))


@pytest.fixture
def tiny_without_anchors() -> HybridLM:
    """The same, where tails begin with zero states."""
    return HybridLM(tiny_model("qwen3_5"), cache=PrefixCache("32MiB", storage=Storage(anchor_bytes=0)))
