"""What people may write for a tier, and what they are told when it is wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tailreplay.errors import CacheConfigError
from tailreplay.keys import tenant_of
from tailreplay.tiers.factory import open_tier
from tailreplay.tiers.guard import Guarded
from tailreplay.tiers.mooncake import MooncakeTier
from tailreplay.tiers.redis import RedisTier
from tests.tiers.conftest import require
from tests.tiers.remote_pages import name, page


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for the tier on disk: remember what it was opened with."""
    module = ModuleType("tailreplay.tiers.disk")
    module.DiskTier = lambda folder, limit, *shares: SimpleNamespace(opened=(folder, limit))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tailreplay.tiers.disk", module)


@pytest.mark.parametrize(
    ("spec", "opened"),
    [
        ("/var/cache/pages", (Path("/var/cache/pages"), 20 << 30)),
        ("pages", (Path("pages"), 20 << 30)),
        ("./a:b?limit=1GiB", (Path("./a:b"), 1 << 30)),
        ("~/pages", (Path("~/pages").expanduser(), 20 << 30)),
        ("disk:/pages?limit=20GB", (Path("/pages"), 20 * 10**9)),
        ("disk:/with%20space", (Path("/with space"), 20 << 30)),
    ],
)
def test_folders(disk: None, spec: str, opened: tuple[Path, int]) -> None:
    assert open_tier(spec).opened == opened  # type: ignore[attr-defined]


def test_redis_urls() -> None:
    tier = open_tier("redis://user:pw@host:6380/3?prefix=mine&ttl=60&timeout=0.5&deadline=0.3")
    assert isinstance(tier, Guarded)
    assert (tier.name, tier._deadline) == ("redis", 0.3)
    plain = tier._tier
    assert isinstance(plain, RedisTier)
    settings = plain._client.connection_pool.connection_kwargs
    assert {key: settings[key] for key in ("host", "port", "db", "username", "password", "socket_timeout")} == {
        "host": "host", "port": 6380, "db": 3, "username": "user", "password": "pw", "socket_timeout": 0.5,
    }  # fmt: skip
    assert (plain._prefix, plain._ttl) == (b"mine", 60_000)


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ("valkey://host", "Connection"),
        ("valkeys://host?ssl_cert_reqs=none", "SSLConnection"),
        ("rediss://host:6390", "SSLConnection"),
        ("unix:///run/redis.sock?db=2", "UnixDomainSocketConnection"),
    ],
)
def test_kinds_of_connection(spec: str, kind: str) -> None:
    tier = open_tier(spec, guarded=False)
    assert isinstance(tier, RedisTier)
    assert tier._client.connection_pool.connection_class.__name__ == kind


def test_mooncake_urls() -> None:
    require("mooncake")
    tier = open_tier("mooncake://host?lend=1GiB&buffer=32MiB&protocol=rdma&device=mlx5_0&host=10.0.0.2", guarded=False)
    assert isinstance(tier, MooncakeTier)
    assert (tier._client.master, tier._client._setup) == ("host:50051", (1 << 30, 32 << 20, "rdma", "mlx5_0"))
    assert tier._client._host == "10.0.0.2"
    other = open_tier("mooncake://[::1]:7?lend=0", guarded=False)
    assert isinstance(other, MooncakeTier)
    assert (other._client.master, other._lend_bytes) == ("[::1]:7", 0)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("s3://bucket", r"'s3' is no storage: name a folder, or a URL .* disk:, mooncake:, redis:, .* and valkeys:\.$"),
        ("", "is no storage"),
        ("disk:/x?size=1GiB", r"'size' is no option of disk: it has limit, reserve and tenant_limit\.$"),
        ("disk:/x?limit=lots", "not a size"),
        ("/x?limit=1GiB&limit=2GiB", "must have one value"),
        ("redis:host", "looks like redis://HOST:PORT"),
        ("redis://:s3cret@h?retry=1", r"'retry' is no option of redis: it has deadline, prefix, timeout, ttl, .*"),
        ("redis://:s3cret@h?ttl=-1", "positive number of seconds, at most 1000000000, got '-1'"),
        ("redis://:s3cret@h?prefix=", "must have one value"),
        ("redis://:s3cret@h:port", "malformed"),
        ("valkey://h?deadline=nan", "positive number"),
        ("mooncake://", "named like"),
        ("mooncake://h:port", "named like"),
        ("mooncake://h/path", "no path"),
        ("mooncake://h?protocol=udp", "'tcp' or 'rdma'"),
        ("mooncake://h?segment=1", r"'segment' is no option of mooncake: .*lend, buffer, protocol, device and host\.$"),
    ],
)
def test_what_is_wrong_is_one_sentence(spec: str, message: str) -> None:
    with pytest.raises(CacheConfigError, match=message) as caught:
        open_tier(spec)
    assert "s3cret" not in str(caught.value)


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(CacheConfigError, match=r"needs the package redis: pip install 'tailreplay\[redis\]'\."):
        open_tier("redis://host")
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(CacheConfigError, match="needs its package: pip install mooncake-transfer-engine"):
        open_tier("mooncake://host")


def test_a_tier_that_was_opened_by_url_works(redis_port: int) -> None:
    tier = open_tier(f"redis://127.0.0.1:{redis_port}/5?prefix=opened&deadline=30")
    tier.put([page(0)])
    assert tier.contains([name(0)])[0] is not None
    tier.close()


@pytest.mark.parametrize("spec", ["disk", "disk:", "disk:?limit=64MiB"])
def test_disk_alone_is_the_default_folder(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tier = open_tier(spec)
    assert (tmp_path / "tailreplay").stat().st_mode & 0o777 == 0o700
    tier.close()


def test_a_disk_has_shares_of_tenants(tmp_path: Path) -> None:
    spec = f"disk:{tmp_path / 'cache'}?limit=64MiB&reserve=alice=2MiB,bob=1MiB&tenant_limit=carol=4MiB"
    tier = open_tier(spec)
    assert tier._quotas.reserved == {tenant_of("alice"): 2 << 20, tenant_of("bob"): 1 << 20}  # type: ignore[attr-defined]
    assert tier._quotas.limits == {tenant_of("carol"): 4 << 20}  # type: ignore[attr-defined]
    tier.close()
    for wrong in ("alice", "=2MiB", "alice=2MiB,alice=3MiB"):
        with pytest.raises(CacheConfigError, match="reserve of disk is SALT=SIZE"):
            open_tier(f"disk:{tmp_path / 'cache'}?reserve={wrong}")


def test_an_addresses_own_deadline_wins() -> None:
    assert open_tier("redis://host?deadline=3", deadline=1.0)._deadline == 3.0  # type: ignore[attr-defined]
    assert open_tier("redis://host", deadline=1.0)._deadline == 1.0  # type: ignore[attr-defined]
