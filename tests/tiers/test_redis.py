"""The Redis tier on a real server: round trips, lost records, lost servers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis.connection import Connection

from tailreplay.errors import CacheConfigError
from tailreplay.page_format import is_intact, unpack_header
from tailreplay.tiers.base import HIDDEN, KV, TierError, TierFullError, TierPage
from tailreplay.tiers.redis import RedisTier
from tests.tiers import servers
from tests.tiers.children import run_child
from tests.tiers.conftest import require
from tests.tiers.remote_pages import content, hint, name, page


@pytest.fixture
def tier(redis_port: int) -> Iterator[RedisTier]:
    made = RedisTier(f"redis://127.0.0.1:{redis_port}/0")
    made._client.flushall()
    yield made
    made.close()


def read(tier: RedisTier, number: int, part: str) -> bytes | None:
    (view,) = tier.get([name(number)], part)
    return None if view is None else bytes(view)


def test_pages_come_back_as_they_were_put(tier: RedisTier) -> None:
    pages = [page(0), page(1, [KV]), page(2, [HIDDEN])]
    tier.put(pages)
    found = tier.contains([name(0), name(1), name(2), name(3)])
    assert [entry and entry.parts for entry in found] == [{KV, HIDDEN}, {KV}, {HIDDEN}, None]
    assert [entry and entry.header for entry in found] == [*(p.header for p in pages), None]
    views = [view and bytes(view) for view in tier.get([name(1), name(2), name(0)], KV)]
    assert views == [content(pages[1], KV), None, content(pages[0], KV)]
    assert tier.resolve([hint(1), hint(9)]) == [name(1), None]


def test_a_part_may_be_many_buffers_of_any_kind(tier: RedisTier) -> None:
    whole = page(0)
    data = content(whole, KV)
    for buffers in ([data[:100], bytearray(data[100:300]), memoryview(data)[300:]], [bytearray(data)]):
        tier.drop([name(0)])
        tier.put([type(whole)(whole.key, whole.header, {KV: buffers})])
        assert read(tier, 0, KV) == data


def test_what_is_there_stays_and_what_lacks_is_added(tier: RedisTier) -> None:
    first, second = page(0, [HIDDEN], seed=1), page(0, seed=2)
    tier.put([first])
    tier.put([second])
    assert (read(tier, 0, HIDDEN), read(tier, 0, KV)) == (content(first, HIDDEN), content(second, KV))
    (found,) = tier.contains([name(0)])
    assert found is not None
    header = unpack_header(found.header)
    for part in (KV, HIDDEN):
        assert is_intact(header.parts[part], read(tier, 0, part) or b"")
    tier.put([page(0, seed=3)])
    assert read(tier, 0, KV) == content(second, KV)


def test_replace_leaves_nothing_of_the_old_page(tier: RedisTier) -> None:
    tier.put([page(0, seed=1)])
    better = page(0, [KV], seed=2)
    tier.replace([better])
    (found,) = tier.contains([name(0)])
    assert found is not None
    assert (found.header, found.parts, read(tier, 0, KV)) == (better.header, {KV}, content(better, KV))


def test_drop_takes_a_part_or_all(tier: RedisTier) -> None:
    tier.put([page(0), page(1)])
    tier.drop([name(0), name(7)], KV)
    tier.drop([name(1)])
    assert [entry and entry.parts for entry in tier.contains([name(0), name(1)])] == [{HIDDEN}, None]


def test_a_page_that_lost_its_header_is_no_page_and_is_written_anew(tier: RedisTier) -> None:
    tier.put([page(0, seed=1)])
    tier._client.delete(tier._header(name(0)))
    assert tier.contains([name(0)]) == [None]
    tier.put([page(0, seed=2)])
    assert read(tier, 0, KV) == content(page(0, seed=2), KV)


def test_a_hint_that_was_evicted_comes_back(tier: RedisTier) -> None:
    tier.put([page(0)])
    tier._client.delete(tier._hint(hint(0)))
    tier.put([page(0)])
    assert tier.resolve([hint(0)]) == [name(0)]


def test_each_call_is_one_round_trip(tier: RedisTier, monkeypatch: pytest.MonkeyPatch) -> None:
    trips = count_trips(monkeypatch)
    keys = [name(n) for n in range(8)]
    pages = [page(n, nbytes=1 << 17) for n in range(8)]
    assert trips(lambda: tier.put(pages)) == 2
    assert trips(lambda: tier.put(pages)) == 1
    assert trips(lambda: tier.contains(keys)) == 1
    assert trips(lambda: tier.resolve([hint(n) for n in range(8)])) == 1
    assert trips(lambda: list(tier.get(keys, KV))) == 1
    assert trips(lambda: tier.drop(keys)) == 1
    assert trips(lambda: (tier.contains([]), tier.resolve([]), list(tier.get([], KV)), tier.drop([]))) == 0


def test_a_value_changed_behind_our_back_is_seen(tier: RedisTier) -> None:
    tier.put([page(0)])
    tier._client.setrange(tier._part(name(0), KV), 100, b"!")
    (found,) = tier.contains([name(0)])
    assert found is not None
    header = unpack_header(found.header)
    assert not is_intact(header.parts[KV], read(tier, 0, KV) or b"")
    assert is_intact(header.parts[HIDDEN], read(tier, 0, HIDDEN) or b"")


def test_prefixes_keep_apart_and_a_time_to_live_is_set(redis_port: int, tier: RedisTier) -> None:
    other = RedisTier(f"valkey://127.0.0.1:{redis_port}", prefix="other", ttl=100)
    other.put([page(0)])
    assert tier.contains([name(0)]) == [None]
    names = [other._header(name(0)), other._part(name(0), KV), other._part(name(0), HIDDEN), other._hint(hint(0))]
    assert all(99_000 < other._client.pttl(stored) <= 100_000 for stored in names)
    other.close()


def test_usage_is_what_the_server_says(tier: RedisTier) -> None:
    before = tier.usage()
    tier.put([page(0, nbytes=1 << 20)])
    after = tier.usage()
    assert (after.bytes_limit, after.pages) == (64 << 20, None)
    assert after.bytes_used is not None
    assert before.bytes_used is not None
    assert after.bytes_used - before.bytes_used > 2 << 20


def test_a_server_that_evicts_leaves_pages_that_are_found_without_what_is_gone(tmp_path: Path) -> None:
    require("redis")
    server = servers.redis_server(tmp_path, maxmemory="6mb")
    try:
        tier = RedisTier(f"redis://127.0.0.1:{server.ports[0]}")
        for number in range(40):
            tier.put([page(number, nbytes=1 << 18)])
        found = tier.contains([name(number) for number in range(40)])
        assert tier.usage().evictions > 0
        for number, entry in enumerate(found):
            for part in entry.parts if entry else ():
                # Even a read may evict: its answer needs memory too.
                assert read(tier, number, part) in (None, content(page(number, nbytes=1 << 18), part))
        assert any(entry is None or len(entry.parts) < 2 for entry in found)
    finally:
        server.kill()


def test_a_server_that_is_full_keeps_no_half_page(tmp_path: Path) -> None:
    require("redis")
    server = servers.redis_server(tmp_path, maxmemory="4mb")
    try:
        tier = RedisTier(f"redis://127.0.0.1:{server.ports[0]}")
        tier._client.config_set("maxmemory-policy", "noeviction")
        with pytest.raises(TierFullError, match="maxmemory"):
            put_one_by_one(tier, [page(number, nbytes=1 << 18) for number in range(40)])
        assert tier._client.dbsize() % 4 == 0, "a header, two parts and a hint for every page"
    finally:
        server.kill()


def test_a_server_that_dies_and_comes_back(tmp_path: Path) -> None:
    require("redis")
    server = servers.redis_server(tmp_path)
    try:
        tier = RedisTier(f"redis://127.0.0.1:{server.ports[0]}")
        tier.put([page(0)])
        server.kill()
        for call in (
            lambda: tier.contains([name(0)]),
            lambda: list(tier.get([name(0)], KV)),
            lambda: tier.put([page(0)]),
        ):
            with pytest.raises(TierError, match=r"^Redis at 127.0.0.1:\d+ does not serve: .*\.$"):
                call()
        server.start()
        assert tier.contains([name(0)]) == [None]
        tier.put([page(0)])
        assert read(tier, 0, KV) == content(page(0), KV)
        tier.close()
        tier.close()
        with pytest.raises(TierError, match="closed"):
            tier.contains([name(0)])
    finally:
        server.kill()


def test_a_wrong_password_is_said_without_it(tmp_path: Path) -> None:
    require("redis")
    server = servers.redis_server(tmp_path, password="right")
    address = f"127.0.0.1:{server.ports[0]}/0"
    try:
        for url in (f"redis://:s3cr%40t@{address}", f"redis://{address}"):
            tier = RedisTier(url)
            with pytest.raises(TierError) as caught:
                tier.contains([name(0)])
            said = f"{caught.value} {caught.value.__cause__} {tier!r}"
            assert "s3cr" not in said
            assert any(word in said for word in ("WRONGPASS", "invalid username-password", "Authentication required"))
        RedisTier(f"redis://:right@{address}").put([page(0)])
    finally:
        server.kill()


def test_nobody_at_the_port_is_a_sentence() -> None:
    tier = RedisTier(f"redis://:s3cret@127.0.0.1:{servers.free_port()}")
    with pytest.raises(TierError) as caught:
        tier.usage()
    assert "s3cret" not in str(caught.value)
    assert str(caught.value).count("\n") == 0


def test_a_server_of_another_kind_is_a_sentence() -> None:
    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(TierError, match=r"does not serve: Protocol [Ee]rror"):
            RedisTier(f"redis://127.0.0.1:{listener.getsockname()[1]}").contains([name(0)])
        thread.join(30)


def test_a_server_that_never_answers_is_given_up() -> None:
    # It accepts connections by its backlog, and that is all.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        tier = RedisTier(f"redis://127.0.0.1:{listener.getsockname()[1]}", timeout=0.1)
        with pytest.raises(TierError, match=r"[Tt]imeout"):
            tier.contains([name(0)])


@pytest.mark.parametrize("url", ["http://h", "redis:h", "redis://h:port", "redis://:s3cret@h/0?socket_timeout=soon"])
def test_a_url_that_is_not_understood_is_a_sentence(url: str) -> None:
    with pytest.raises(CacheConfigError) as caught:
        RedisTier(url)
    assert "s3cret" not in str(caught.value)


def test_what_one_process_puts_another_gets(redis_port: int, tier: RedisTier) -> None:
    script = (
        "from tailreplay.tiers.redis import RedisTier\n"
        "from tests.tiers.remote_pages import page\n"
        "RedisTier(target).put([page(5)])\n"
    )
    run_child(script, f"redis://127.0.0.1:{redis_port}/0")
    assert read(tier, 5, KV) == content(page(5), KV)


def count_trips(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], int]:
    """Return a function that says how often a call sends something after it has waited for an answer."""
    steps: list[str] = []
    for method in ("send_packed_command", "read_response"):
        monkeypatch.setattr(Connection, method, noted(steps, method, getattr(Connection, method)))

    def trips(call: Callable[[], object]) -> int:
        steps.clear()
        call()
        return sum(
            now == "send_packed_command" and before != now for before, now in zip(["", *steps], steps, strict=False)
        )

    return trips


def noted(steps: list[str], name: str, method: Callable[..., object]) -> Callable[..., object]:
    def call(*args: object, **options: object) -> object:
        steps.append(name)
        return method(*args, **options)

    return call


def put_one_by_one(tier: RedisTier, pages: list[TierPage]) -> None:
    for single in pages:
        tier.put([single])
