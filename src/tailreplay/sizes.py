"""Byte sizes as people write them."""

from __future__ import annotations

import re

from tailreplay.errors import CacheConfigError

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)\s*", re.IGNORECASE)


def parse_bytes(size: int | str) -> int:
    """Turn ``8589934592``, ``"8GiB"`` or ``"512 MB"`` into a number of bytes.

    Raises
    ------
    CacheConfigError
        If `size` is neither a positive integer nor a number with a unit.
    """
    if isinstance(size, str):
        found = _SIZE.fullmatch(size)
        unit = _UNITS.get(found[2].lower()) if found else None
        if found is None or unit is None:
            raise CacheConfigError(f"{size!r} is not a size: write a number with a unit, like '8GiB'.")
        size = int(float(found[1]) * unit)
    if not isinstance(size, int) or isinstance(size, bool):
        raise CacheConfigError(f"A size must be a whole number of bytes or a text like '8GiB', got {size!r}.")
    if size <= 0:
        raise CacheConfigError(f"A size must be positive, got {size}.")
    return size


def format_bytes(size: float) -> str:
    """Render `size` bytes with the largest binary unit that keeps it at or above one: ``49.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
