"""A disk tier in a folder of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tailreplay.tiers.disk import DiskTier
from tests.tiers.looking import MIB


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def tier(folder: Path) -> Iterator[DiskTier]:
    tier = DiskTier(folder, 16 * MIB)
    yield tier
    tier.close()
