"""Looking into a disk tier, from this process and from others."""

from __future__ import annotations

import subprocess
import sys

from tailreplay.tiers.disk import DiskTier
from tests.tiers.pages import key_of

MIB = 2**20
HEAD = "import sys\nfrom tailreplay.tiers.disk import DiskTier\nfrom tests.tiers.pages import *\n"


def names(tier: DiskTier, oldest_first: bool = True) -> list[int]:
    return [int.from_bytes(key[4:], "big") for key, _, _ in tier.headers(oldest_first)]


def values(tier: DiskTier, indices: list[int], part: str = "kv") -> list[bytes | None]:
    return [None if view is None else bytes(view) for view in tier.get([key_of(i) for i in indices], part)]


def in_child(code: str, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HEAD + code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=check,
        timeout=120,
    )
