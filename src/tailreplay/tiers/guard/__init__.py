"""Deadlines and a back-off around a tier; see `tailreplay.tiers.guard.guarded`."""

from tailreplay.tiers.guard.guarded import Counts, Guarded

__all__ = ["Counts", "Guarded"]
