"""Two servers that share a store reuse each other's pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.conftest import running
from tests.server.test_restart import OPTIONS, PROMPT, cached, wait_written
from tests.tiers import servers
from tests.tiers.conftest import require


@pytest.fixture(params=["redis", "mooncake"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Address of a store on this machine."""
    kind = str(request.param)
    require(kind)
    start = servers.redis_server if kind == "redis" else servers.mooncake_server
    server = start(tmp_path)
    address = f"{kind}://127.0.0.1:{server.ports[0]}"
    yield f"{address}?lend=64MiB" if kind == "mooncake" else address
    server.kill()


def test_what_one_server_stores_the_other_reuses(tmp_path: Path, store: str) -> None:
    options = (*OPTIONS, "--tier", store, "--tier-deadline", "5")
    with running(tmp_path / "first", *options) as (first, _), running(tmp_path / "second", *options) as (second, _):
        assert cached(first, PROMPT) == 0
        wait_written(first)
        assert cached(second, [*PROMPT, 9], cache_salt="other") == 0
        assert cached(second, [*PROMPT, 9]) == len(PROMPT)
        # And the other way, at a token where the first one never was.
        longer = [*PROMPT, 9, *range(50, 250)]
        assert cached(second, longer) >= len(PROMPT)
        wait_written(second)
        assert cached(first, [*longer, 7]) >= len(longer) - 16
