"""LFM2: short convolutions instead of a recurrence, so a short tail is exact."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

from tailreplay.engines.transformers.families.generic import Family


@dataclass(frozen=True)
class Lfm2Family(Family):
    """LFM2, with gated short convolutions."""

    mixers: tuple[str, ...] = ("conv", "self_attn")

    def conv_kernel(self, config: PretrainedConfig) -> int | None:
        width: int = config.conv_L_cache
        return width
