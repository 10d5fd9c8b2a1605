"""The Mooncake tier on a real master: what it stores, what it refuses, and what happens when the other side is gone."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tailreplay.errors import CacheConfigError
from tailreplay.page_format import is_intact, unpack_header
from tailreplay.tiers.base import HIDDEN, KV, TierError, TierFullError, TierPage
from tailreplay.tiers.mooncake import MooncakeTier
from tests.tiers import servers
from tests.tiers.children import run_child
from tests.tiers.conftest import require
from tests.tiers.remote_pages import content, hint, name, page


@pytest.fixture(scope="module")
def lender(mooncake_port: int) -> Iterator[MooncakeTier]:
    # One for all: closing a client stops the process for a second.
    made = MooncakeTier(f"127.0.0.1:{mooncake_port}", lend="64MiB", buffer="16MiB")
    yield made
    made.close()
    with pytest.raises(TierError, match="closed"):
        made.contains([name(0)])
    made.close()


@pytest.fixture
def tier(lender: MooncakeTier) -> MooncakeTier:
    lender._client.call("remove_all", True)
    return lender


def read(tier: MooncakeTier, number: int, part: str) -> bytes | None:
    (view,) = tier.get([name(number)], part)
    return None if view is None else bytes(view)


def test_pages_come_back_as_they_were_put(tier: MooncakeTier) -> None:
    pages = [page(0), page(1, [KV]), page(2, [HIDDEN])]
    tier.put(pages)
    found = tier.contains([name(0), name(1), name(2), name(3)])
    assert [entry and entry.parts for entry in found] == [{KV, HIDDEN}, {KV}, {HIDDEN}, None]
    assert [entry and entry.header for entry in found] == [*(p.header for p in pages), None]
    views = [view and bytes(view) for view in tier.get([name(1), name(2), name(0)], KV)]
    assert views == [content(pages[1], KV), None, content(pages[0], KV)]
    assert tier.resolve([hint(1), hint(9)]) == [name(1), None]
    assert (tier.contains([]), tier.resolve([]), list(tier.get([], KV))) == ([], [], [])


def test_what_is_asked_for_twice_comes_twice(tier: MooncakeTier) -> None:
    pages = [page(0), page(1)]
    tier.put(pages)
    views = [bytes(view or b"") for view in tier.get([name(0), name(0), name(1), name(0)], KV)]
    assert views == [content(pages[n], KV) for n in (0, 0, 1, 0)]
    assert tier.resolve([hint(0), hint(0), hint(1)]) == [name(0), name(0), name(1)]


def test_a_part_may_be_many_buffers_of_any_kind(tier: MooncakeTier) -> None:
    whole = page(0)
    data = content(whole, KV)
    for buffers in ([data[:100], bytearray(data[100:300]), memoryview(data)[300:]], [bytearray(data)]):
        tier.drop([name(0)])
        tier.put([TierPage(whole.key, whole.header, {KV: buffers})])
        assert read(tier, 0, KV) == data


def test_what_is_there_stays_and_what_lacks_is_added(tier: MooncakeTier) -> None:
    first, second = page(0, [HIDDEN], seed=1), page(0, seed=2)
    tier.put([first])
    tier.put([second])
    assert (read(tier, 0, HIDDEN), read(tier, 0, KV)) == (content(first, HIDDEN), content(second, KV))
    (found,) = tier.contains([name(0)])
    assert found is not None
    header = unpack_header(found.header)
    assert all(is_intact(header.parts[part], read(tier, 0, part) or b"") for part in (KV, HIDDEN))


def test_replace_leaves_nothing_of_the_old_page_in_spite_of_leases(tier: MooncakeTier) -> None:
    tier.put([page(0, seed=1)])
    assert read(tier, 0, KV) is not None
    better = page(0, [KV], seed=2)
    tier.replace([better])
    (found,) = tier.contains([name(0)])
    assert found is not None
    assert (found.header, found.parts, read(tier, 0, KV)) == (better.header, {KV}, content(better, KV))


def test_drop_takes_a_part_or_all(tier: MooncakeTier) -> None:
    tier.put([page(0), page(1)])
    tier.drop([name(0), name(7)], KV)
    tier.drop([name(1)])
    assert [entry and entry.parts for entry in tier.contains([name(0), name(1)])] == [{HIDDEN}, None]


def test_a_page_that_lost_its_header_is_no_page_and_is_written_anew(tier: MooncakeTier) -> None:
    tier.put([page(0, seed=1)])
    tier._client.call("batch_remove", [tier._header(name(0))], True)
    assert tier.contains([name(0)]) == [None]
    tier.put([page(0, seed=2)])
    assert read(tier, 0, KV) == content(page(0, seed=2), KV)


def test_a_value_changed_behind_our_back_is_seen(tier: MooncakeTier) -> None:
    tier.put([page(0)])
    stored = tier._part(name(0), KV)
    tier._client.call("batch_remove", [stored], True)
    tier._client.call("put", stored, b"!" * 4096)
    (found,) = tier.contains([name(0)])
    assert found is not None
    header = unpack_header(found.header)
    assert not is_intact(header.parts[KV], read(tier, 0, KV) or b"")
    assert is_intact(header.parts[HIDDEN], read(tier, 0, HIDDEN) or b"")


def test_more_than_the_buffer_holds_comes_in_several_batches(tier: MooncakeTier) -> None:
    numbers = range(20)
    tier.put([page(n, [KV], nbytes=1 << 20) for n in numbers])
    tier._largest.clear()
    keys = [name(n) for n in numbers]
    for i, view in enumerate(tier.get([*keys, name(99)], KV)):
        assert (view is None) == (i == 20)
        assert view is None or bytes(view) == content(page(i, [KV], nbytes=1 << 20), KV)
    held = list(tier.get(keys[:12], KV))
    assert [bytes(view or b"")[:9] for view in held] == [
        content(page(n, [KV], nbytes=1 << 20), KV)[:9] for n in range(12)
    ]


def test_a_part_that_is_larger_than_the_buffer_is_refused(tier: MooncakeTier) -> None:
    with pytest.raises(TierFullError, match=r"24.0 MiB does not fit into Mooncake's buffer of 16.0 MiB"):
        tier.put([page(0, [KV], nbytes=24 << 20)])
    assert tier.contains([name(0)]) == [None]


def test_a_full_store_refuses_whole_pages_and_evicts_when_leases_end(tier: MooncakeTier) -> None:
    pages = [page(n, nbytes=1 << 20) for n in range(40)]
    refused = put_until_full(tier, pages)
    assert refused > 20
    assert tier.contains([pages[refused].key]) == [None]
    assert set(tier._exist([tier._part(pages[refused].key, part) for part in (KV, HIDDEN)])) == {False}
    end = time.monotonic() + 20
    while tier.contains([pages[39].key]) == [None]:
        assert time.monotonic() < end
        try:
            tier.put([pages[39]])
        except TierFullError:
            time.sleep(0.05)
    assert read(tier, 39, KV) == content(pages[39], KV)


def test_what_one_process_puts_another_gets_that_lends_nothing(mooncake_port: int, tier: MooncakeTier) -> None:
    tier.put([page(4)])
    out = run_child(
        "from tests.tiers.remote_pages import page, name\n"
        "tier = MooncakeTier(target, lend='0')\n"
        "tier.put([page(5)])\n"
        "print(bytes(next(tier.get([name(4)], 'kv'))) == b''.join(page(4).parts['kv']))\n",
        f"127.0.0.1:{mooncake_port}",
    )
    assert out.split() == ["True"]
    assert read(tier, 5, KV) == content(page(5), KV)


def test_no_master_is_a_sentence_at_once() -> None:
    require("mooncake")
    tier = MooncakeTier(f"127.0.0.1:{servers.free_port()}", lend="16MiB")
    began = time.monotonic()
    with pytest.raises(TierError, match=r"^No Mooncake master answers at 127.0.0.1:\d+: .*\.$"):
        tier.contains([name(0)])
    assert time.monotonic() - began < 2
    tier.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"master": "host"}, "HOST:PORT"),
        ({"master": "host:1", "protocol": "udp"}, "'tcp' or 'rdma'"),
        ({"master": "host:1", "lend": "much"}, "not a size"),
        ({"master": "host:1", "lend": "1MiB"}, "16.0 MiB at least"),
    ],
)
def test_wrong_options_are_a_sentence(options: dict[str, str], message: str) -> None:
    with pytest.raises(CacheConfigError, match=message):
        MooncakeTier(**options)  # type: ignore[arg-type]


def put_until_full(tier: MooncakeTier, pages: list[TierPage]) -> int:
    """Return which page was refused. All before it are leased, so that none is evicted for it."""
    for i, single in enumerate(pages):
        try:
            tier.put([single])
        except TierFullError:
            return i
        tier.contains([earlier.key for earlier in pages[: i + 1]])
    raise AssertionError("it took them all")
