"""The disk tier: the limit of its file, and which pages make room."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tailreplay.tiers.base import TierError, TierFullError, TierPage
from tailreplay.tiers.disk import DiskTier
from tailreplay.tiers.disk.file import DATA
from tailreplay.tiers.guard import Guarded
from tests.tiers.looking import MIB, in_child, names, values
from tests.tiers.pages import TENANTS, key_of, make_page, value_of


@pytest.mark.parametrize(
    ("low", "high"), [(1, 2000), (1, 300_000), (200_000, 200_000), (900_000, 1_100_000), (100, 5_000_000)]
)
def test_the_file_never_exceeds_the_limit(tier: DiskTier, folder: Path, low: int, high: int) -> None:
    draw = random.Random(high)
    put = 0
    step = 0
    while put < 60 * MIB and step < 3000:
        sizes = {"kv": draw.randint(low, high), "hidden": draw.randint(low, max(low, high // 3))}
        page = TierPage(key_of(step), b"header", {part: [bytes(size)] for part, size in sizes.items()})
        tier.put([page])
        assert os.path.getsize(folder / DATA) <= 16 * MIB
        put += page.nbytes
        step += 1
    used = tier.usage().bytes_used or 0
    if put > 16 * MIB:
        assert used > 0.6 * 16 * MIB, "room is wasted"


def test_a_page_that_is_larger_than_the_limit_is_refused(tier: DiskTier) -> None:
    pages = [make_page(0, {"kv": 1000}), make_page(1, {"kv": 17 * MIB}), make_page(2, {"kv": 1000})]
    with pytest.raises(TierError, match="larger than the disk cache's limit"):
        tier.put(pages)
    assert sorted(names(tier)) == [0, 2]
    tier.put([make_page(3, {"kv": 14 * MIB})])
    tier.put([make_page(4, {"kv": 14 * MIB})])
    assert names(tier)[-1] == 4, "one that only just fits takes the place of everything"


def test_the_limit_can_change_between_starts(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with_limit = DiskTier(folder, 16 * MIB)
    with_limit.put([make_page(i, {"kv": 300_000}) for i in range(60)])
    with_limit.close()
    small = DiskTier(folder, 4 * MIB)
    assert os.path.getsize(folder / DATA) <= 4 * MIB
    kept = names(small)
    assert len(kept) >= 8
    assert 0 not in kept or 59 in kept
    assert values(small, kept) == [value_of(make_page(i, {"kv": 300_000}), "kv") for i in kept]
    small.close()
    looking = DiskTier(folder)
    assert looking.limit == 4 * MIB
    looking.close()
    large = DiskTier(folder, 32 * MIB)
    large.put([make_page(i, {"kv": 300_000}) for i in range(100, 160)])
    assert len(names(large)) >= 60
    large.close()
    assert not caplog.records


def test_a_smaller_limit_waits_until_nobody_else_has_the_file(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = DiskTier(folder, 16 * MIB)
    first.put([make_page(i, {"kv": 300_000}) for i in range(40)])
    done = in_child(
        "import logging, os\nlogging.basicConfig()\ntier = DiskTier(sys.argv[1], 4 * 2**20)\n"
        "print(tier.usage().bytes_used, os.path.getsize(sys.argv[1] + '/data.mdb'))",
        folder,
    )
    used, size = map(int, done.stdout.split())
    assert used <= 4 * MIB < size
    assert "above its limit of 4.0 MiB" in done.stderr
    first.close()
    DiskTier(folder, 4 * MIB).close()
    assert os.path.getsize(folder / DATA) <= 4 * MIB


def test_another_process_may_raise_the_limit(tier: DiskTier, folder: Path) -> None:
    tier.put([make_page(0, {"kv": 1000})])
    code = "tier = DiskTier(sys.argv[1], 64 * 2**20)\ntier.put([make_page(i, {'kv': 2**20}) for i in range(1, 40)])"
    in_child(code, folder)
    assert values(tier, [0, 39]) == [value_of(make_page(i, {"kv": n}), "kv") for i, n in [(0, 1000), (39, MIB)]]
    assert tier.limit == 64 * MIB
    tier.put([make_page(50, {"kv": 1000})])


def test_a_full_disk_is_no_end(folder: Path) -> None:
    code = """
import os, resource
tier = DiskTier(sys.argv[1], 64 * 2**20)
tier.put([make_page(i, {"kv": 500_000}) for i in range(10)])
resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(sys.argv[1] + "/data.mdb"), -1))
tier.put([make_page(i, {"kv": 500_000}) for i in range(10, 30)])
assert [v is not None for v in tier.get([key_of(29)], "kv")] == [True]
assert tier.usage().evictions >= 15
"""
    in_child(code, folder)


def test_pruning_gives_room_back(tier: DiskTier, folder: Path) -> None:
    tier.put([make_page(i, {"kv": 300_000}) for i in range(40)])
    assert tier.prune(to_bytes=3 * MIB)[0] > 20
    assert names(tier) == sorted(names(tier), reverse=True), "of one put, the end of the chain is the oldest"
    assert tier.compact()
    assert os.path.getsize(folder / DATA) < 4 * MIB
    tier.put([make_page(i, {"kv": 300_000}) for i in range(40)])
    assert len(names(tier)) == 40


def test_least_recently_used_pages_go_first(tier: DiskTier, folder: Path) -> None:
    for i in range(40):
        tier.put([make_page(i, {"kv": 300_000})])
    assert names(tier) == list(range(40))
    values(tier, [0, 1])
    list(tier.get([key_of(2)], "hidden"))  # Not there: no use of it.
    tier.contains([key_of(3)])
    tier.close()
    again = DiskTier(folder, 16 * MIB)
    assert names(again) == [*range(2, 40), 1, 0], "what was read is remembered, the start of a chain longest"
    for i in range(40, 60):
        again.put([make_page(i, {"kv": 300_000})])
    kept = names(again)
    assert {0, 1} <= set(kept)
    assert not {2, 3, 4, 5} & set(kept)
    assert kept == [i for i in [*range(2, 40), 1, 0, *range(40, 60)] if i in kept]
    again.close()


def test_hiddens_may_go_before_pages(folder: Path) -> None:
    tier = DiskTier(folder, 16 * MIB, hidden_first=True)
    for i in range(45):
        tier.put([make_page(i, {"kv": 200_000, "hidden": 200_000})])
    pages = {int.from_bytes(key[4:], "big"): parts for key, _, parts in tier.headers(oldest_first=True)}
    assert list(pages) == list(range(45)), "no page is gone"
    stripped = [i for i, parts in pages.items() if parts == {"kv"}]
    assert stripped == list(range(len(stripped)))
    assert 10 < len(stripped) < 45
    for i in range(45, 120):
        tier.put([make_page(i, {"kv": 200_000, "hidden": 200_000})])
    assert names(tier)[-1] == 119
    assert 0 not in names(tier)
    tier.close()


def test_one_tenants_traffic_leaves_anothers_share(folder: Path) -> None:
    ours, theirs, free = TENANTS
    tier = DiskTier(folder, 16 * MIB, reserved={ours: 4 * MIB})
    tier.put([make_page(i, {"kv": 300_000}, tenant=ours) for i in range(25)])
    draw = random.Random(0)
    for i in range(100, 250):
        tier.put([make_page(i, {"kv": draw.randint(1000, 500_000)}, tenant=draw.choice([theirs, free]))])
        assert tier.usage().by_tenant[ours] >= 4 * MIB
    assert tier.usage().by_tenant[ours] <= 5 * MIB, "what it holds beyond its share makes room"
    tier.put([make_page(i, {"kv": 300_000}, tenant=ours) for i in range(300, 330)])
    assert tier.usage().by_tenant[ours] >= 5 * MIB, "its own pages go, and those of others"
    tier.close()


def test_if_all_is_reserved_the_others_get_nothing(folder: Path) -> None:
    ours, theirs, _ = TENANTS
    tier = DiskTier(folder, 16 * MIB, reserved={ours: 12 * MIB})
    tier.put([make_page(i, {"kv": 500_000}, tenant=ours) for i in range(24)])
    tier.put([make_page(100, {"kv": MIB}, tenant=theirs)])
    with pytest.raises(TierError, match="reserved for other tenants"):
        tier.put([make_page(101, {"kv": 4 * MIB}, tenant=theirs)])
    assert len(names(tier)) == 25, "nothing went"
    tier.close()


def test_a_tenant_over_its_limit_evicts_its_own(folder: Path) -> None:
    ours, theirs, _ = TENANTS
    tier = DiskTier(folder, 16 * MIB, limits={theirs: 2 * MIB})
    tier.put([make_page(i, {"kv": 300_000}, tenant=ours) for i in range(10)])
    for i in range(100, 130):
        tier.put([make_page(i, {"kv": 300_000}, tenant=theirs)])
        assert tier.usage().by_tenant[theirs] <= 2 * MIB
    assert set(range(10)) <= set(names(tier))
    assert names(tier)[-6:] == list(range(124, 130))
    with pytest.raises(TierError, match="larger"):
        tier.put([make_page(200, {"kv": 3 * MIB}, tenant=theirs)])
    tier.close()


def test_a_small_file_full_of_small_pages_takes_new_ones(folder: Path) -> None:
    """Every one of them changes some file pages of each table, evicted or put: there is never room for many at once."""
    tier = DiskTier(folder, 2 * MIB)
    rng = random.Random(1)
    for _ in range(60):
        batch = [
            TierPage(rng.randbytes(32), bytes(700), {"kv": [bytes(250)], "hidden": [bytes(60)]}, (rng.randbytes(32),))
            for _ in range(rng.randrange(20, 60))
        ]
        tier.put(batch)
        # Put last, it is there.
        assert tier.contains([batch[-1].key]) != [None]
        assert tier.file_bytes <= 2 * MIB
    tier.close()


def test_a_page_that_does_not_fit_is_no_reason_not_to_read(tier: DiskTier) -> None:
    guarded = Guarded(tier)
    guarded.put([make_page(0, {"kv": 1000})])
    with pytest.raises(TierFullError):
        guarded.put([make_page(1, {"kv": 17 * MIB})])
    assert not guarded.is_down
    assert guarded.contains([key_of(0)]) != [None]
    guarded.close()
