"""Granite 4: embeddings are scaled before the first layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from tailreplay.engines.transformers.families.gates import MAMBA, Gate
from tailreplay.engines.transformers.families.generic import Family


@dataclass(frozen=True)
class GraniteFamily(Family):
    """GraniteMoeHybrid, with Mamba-2 layers."""

    mixers: tuple[str, ...] = ("mamba", "self_attn")
    state_ops: float = 4.0
    gate: Gate | None = MAMBA

    def embed(self, model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
        multiplier: float = model.config.get_text_config(decoder=True).embedding_multiplier
        return super().embed(model, ids) * multiplier
