"""The same fixtures as the live tests."""

from tests.vllm_live.conftest import slow_model

__all__ = ["slow_model"]
