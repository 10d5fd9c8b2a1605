"""Pages in the shape of real models, by arithmetic alone: neither weights nor a config file is needed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tailreplay.pages import PageLayout, PartSpec
from tailreplay.topology import Topology


@dataclass(frozen=True)
class PageShape:
    """What the pages of a model are made of.

    Attributes
    ----------
    layers, every : int
        Layers in all; each `every`-th is a full-attention layer, the others are linear ones.
    width : int
        Channels of a hidden.
    kv_heads, head_dim : int
        Of one attention layer.
    """

    layers: int
    every: int
    width: int
    kv_heads: int
    head_dim: int

    @property
    def topology(self) -> Topology:
        """Groups of the model."""
        kinds = ["linear_attention"] * (self.every - 1) + ["full_attention"]
        return Topology.from_layer_types(kinds * (self.layers // self.every))

    def layout(self, page_size: int = 64, dtype: torch.dtype = torch.bfloat16) -> PageLayout:
        """Return the parts of its pages, without codecs."""
        topology = self.topology
        head = self.kv_heads, self.head_dim
        kv = tuple(
            (PartSpec(f"k{layer}", head, dtype), PartSpec(f"v{layer}", head, dtype))
            for layer in topology.attention_layers
        )
        hidden = tuple(PartSpec(f"h{group.index}", (self.width,), dtype) for group in topology.stored_groups)
        return PageLayout(page_size, kv, hidden)


# The figures of the models' configs.
PAGE_SHAPES = {
    "tiny": PageShape(layers=8, every=4, width=64, kv_heads=2, head_dim=16),
    "qwen3.5-0.8b": PageShape(layers=24, every=4, width=1024, kv_heads=2, head_dim=256),
    "qwen3.5-4b": PageShape(layers=32, every=4, width=2560, kv_heads=4, head_dim=256),
    "qwen3.6-27b": PageShape(layers=64, every=4, width=5120, kv_heads=4, head_dim=256),
}
