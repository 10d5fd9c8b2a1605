"""Pages in a Mooncake Store; see `tailreplay.tiers.mooncake.tier`."""

from tailreplay.tiers.mooncake.tier import MooncakeTier

__all__ = ["MooncakeTier"]
