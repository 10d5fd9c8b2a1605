"""A linear layer's cache entry that keeps token-major inputs token-major."""

from __future__ import annotations

from typing import Any

import torch

from tailreplay.engines.transformers.compat import DynamicCache, LinearAttentionLayer


class TokenMajorStates(LinearAttentionLayer):  # type: ignore[misc]
    """Stands in for transformers' ``LinearAttentionLayer``.

    The library joins a convolution's left context and its inputs channel-major, which turns the memory of a whole chunk
    of tokens round (a slow copy) and back again for the convolution and the heads.
    """

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Take in inputs ``(batch, channels, n)`` and return them after the context so far, if any. Mutates self."""
        if self.record_past or not self.has_previous_state[state_idx]:
            joined: torch.Tensor = super().update_conv_state(conv_states, state_idx=state_idx, **kwargs)
            return joined
        context = self.conv_states[state_idx]
        assert context is not None
        joined = torch.cat((context.transpose(1, 2), conv_states.transpose(1, 2)), dim=1).transpose(1, 2)
        context.copy_(joined[..., -context.shape[-1] :])
        return joined


def token_major(cache: DynamicCache) -> DynamicCache:
    """Put `TokenMajorStates` into an empty cache for the library's own entries, and return it. Mutates it."""
    for index, entry in enumerate(cache.layers):
        if type(entry) is LinearAttentionLayer:
            cache.layers[index] = TokenMajorStates(entry.number_of_states)
    return cache
