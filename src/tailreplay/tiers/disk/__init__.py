"""Pages on a local disk, in an LMDB database; see `tailreplay.tiers.disk.tier`."""

from tailreplay.tiers.disk.file import default_path
from tailreplay.tiers.disk.tier import DiskTier

__all__ = ["DiskTier", "default_path"]
