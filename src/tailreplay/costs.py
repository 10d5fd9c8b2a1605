"""What a prefill, a replay and a page cost, in floating-point operations and bytes.

One multiply-add counts as two operations. Attention scores and values are counted; norms, activations, softmax and the
linear layers' elementwise work are not, so the figures are lower bounds of the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tailreplay.topology import Topology


@dataclass(frozen=True)
class LayerCost:
    """Operations of one layer.

    Attributes
    ----------
    mixer : float
        A token, in the token mixer's projections and state update.
    ffn : float
        A token, in the feed-forward part (active experts only).
    per_pair : float
        A (query, key) pair, in attention scores and values; 0 for linear layers.
    """

    mixer: float
    ffn: float
    per_pair: float = 0.0


@dataclass(frozen=True)
class CostModel:
    """Costs of a model under a topology.

    Attributes
    ----------
    layers : tuple of LayerCost
        One per layer.
    head : float
        Operations of the output head for one token; a prefill needs it once.
    kv_bytes : int
        Bytes of keys and values a token, all attention layers together.
    hidden_bytes : tuple of int
        Bytes of hiddens a token, one entry per stored group.
    state_bytes : int
        Bytes of one copy of every recurrent and convolution state.
    """

    topology: Topology
    layers: tuple[LayerCost, ...]
    head: float
    kv_bytes: int
    hidden_bytes: tuple[int, ...]
    state_bytes: int

    @property
    def page_bytes_per_token(self) -> int:
        """Cached bytes a token: keys, values and hiddens."""
        return self.kv_bytes + sum(self.hidden_bytes)

    def prefill_flops(self, start: int, stop: int) -> float:
        """Operations to run tokens ``start .. stop-1`` through the whole model, with `start` tokens cached."""
        tokens = stop - start
        pairs = (start + 1 + stop) * tokens / 2
        per_token = sum(layer.mixer + layer.ffn for layer in self.layers)
        return tokens * per_token + pairs * sum(layer.per_pair for layer in self.layers) + self.head

    def replay_flops(self, tails: Sequence[int], skip: bool = True) -> float:
        """Operations to replay `tails` tokens in each group; `skip`: without the feed-forward part after the last mixer."""
        total = 0.0
        for group, tail in zip(self.topology.groups, tails, strict=True):
            per_token = sum(self.layers[i].mixer + self.layers[i].ffn for i in group.layers)
            total += tail * (per_token - (self.layers[group.layers[-1]].ffn if skip else 0.0))
        return total

    def hit_flops(self, matched: int, tokens: int, tails: Sequence[int], skip: bool = True) -> float:
        """Operations of a hit: replay, then a prefill of what is left of a prompt of `tokens`."""
        return self.replay_flops(tails, skip) + self.prefill_flops(matched, tokens)

    def hit_bytes(self, matched: int, tails: Sequence[int], anchor: bool = False) -> int:
        """Bytes that a hit loads: keys and values of every matched token, hiddens of the tails, an anchor's states."""
        stored = [tail for group, tail in zip(self.topology.groups, tails, strict=True) if group.stores_hidden]
        hiddens = sum(k * size for k, size in zip(stored, self.hidden_bytes, strict=True))
        return matched * self.kv_bytes + hiddens + anchor * self.state_bytes
