"""The disk tier: what is particular to a file."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from tailreplay.errors import CacheConfigError
from tailreplay.page_format import is_intact, unpack_header
from tailreplay.tiers.base import TierError, TierPage
from tailreplay.tiers.disk import DiskTier, default_path
from tailreplay.tiers.disk_file import DAMAGED, DATA
from tests.tiers.pages import TENANTS, hint_of, key_of, make_page, value_of

MIB = 2**20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def tier(folder: Path) -> Iterator[DiskTier]:
    tier = DiskTier(folder, 16 * MIB)
    yield tier
    tier.close()


def names(tier: DiskTier, oldest_first: bool = True) -> list[int]:
    return [int.from_bytes(key[4:], "big") for key, _, _ in tier.headers(oldest_first)]


def values(tier: DiskTier, indices: list[int], part: str = "kv") -> list[bytes | None]:
    return [None if view is None else bytes(view) for view in tier.get([key_of(i) for i in indices], part)]


def in_child(code: str, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    head = "import sys\nfrom tailreplay.tiers.disk import DiskTier\nfrom tests.tiers.pages import *\n"
    return subprocess.run(
        [sys.executable, "-c", head + code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=check,
        timeout=120,
    )


# The folder.


def test_the_default_folder_follows_the_desktop_standard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_path() == tmp_path / ".cache" / "tailreplay"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert default_path() == tmp_path / "other" / "tailreplay"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_path() == tmp_path / ".cache" / "tailreplay", "the standard says to ignore relative paths"


def test_only_the_owner_may_look(tier: DiskTier, folder: Path) -> None:
    tier.put([make_page(0, {"kv": 100})])
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir()} == {
        "data.mdb": 0o600, "lock.mdb": 0o600, "users.lock": 0o600,
    }  # fmt: skip
    tier.prune()
    assert tier.compact()
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}


def test_a_folder_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    for path in (file, file / "below"):
        with pytest.raises(
            CacheConfigError, match=r"^The cache folder '.*' is a file, or lies below one: name a folder\.$"
        ):
            DiskTier(path, 16 * MIB)
    with pytest.raises(CacheConfigError, match="no cache"):
        DiskTier(tmp_path / "none")
    assert not (tmp_path / "none").exists(), "whoever only looks makes nothing"
    with pytest.raises(CacheConfigError, match="too small"):
        DiskTier(tmp_path / "small", 1000)
    with pytest.raises(CacheConfigError, match="reserve"):
        DiskTier(tmp_path / "reserved", 16 * MIB, reserved={TENANTS[0]: 15 * MIB})
    DiskTier(tmp_path / "reserved", 16 * MIB).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_folder_of_somebody_else_is_one_sentence() -> None:
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        done = in_child(
            "import os, lmdb, tailreplay.tiers.disk as disk\nos.setuid(65534)\n"
            "try: disk.DiskTier(sys.argv[1], 2**24)\nexcept Exception as error: print(type(error).__name__, error)",
            Path(place) / "cache",
        )
        assert done.stdout.startswith("CacheConfigError The cache folder")
        assert "cannot be made: Permission denied." in done.stdout
        Path(place, "cache").mkdir(mode=0o755)
        done = in_child(
            "import os, lmdb, tailreplay.tiers.disk as disk\nos.setuid(65534)\n"
            "try: disk.DiskTier(sys.argv[1], 2**24)\nexcept Exception as error: print(type(error).__name__, error)",
            Path(place) / "cache",
        )
        assert "CacheConfigError" in done.stdout
        assert "cannot be written" in done.stdout


def test_another_programs_database_is_left_alone(folder: Path) -> None:
    folder.mkdir()
    with lmdb.open(str(folder)) as env, env.begin(write=True) as txn:
        txn.put(b"theirs", b"value")
    before = (folder / DATA).read_bytes()
    with pytest.raises(CacheConfigError, match="another program's database"):
        DiskTier(folder, 16 * MIB)
    assert (folder / DATA).read_bytes() == before


def test_it_needs_lmdb_only_when_opened(folder: Path) -> None:
    code = """
class Blocked:
    def find_spec(self, name, *_):
        if name == "lmdb":
            raise ModuleNotFoundError("No module named 'lmdb'", name="lmdb")
sys.meta_path.insert(0, Blocked())
try: DiskTier(sys.argv[1], 2**24)
except Exception as error: print(type(error).__name__, error)
"""
    assert (
        in_child(code, folder).stdout == "CacheConfigError The disk cache needs the package 'lmdb': pip install lmdb.\n"
    )


# Room.


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


# Order and quotas.


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


# Putting.


def test_a_page_gets_the_parts_that_it_lacks(tier: DiskTier) -> None:
    first, second = make_page(0, {"kv": 5000}), make_page(0, {"kv": 6000, "hidden": 7000}, version=1, created=5.0)
    tier.put([first])
    tier.put([second])
    [found] = tier.contains([key_of(0)])
    assert found is not None
    header = unpack_header(found.header)
    assert values(tier, [0]) == [value_of(first, "kv")], "what is there stays"
    assert values(tier, [0], "hidden") == [value_of(second, "hidden")]
    for part in ("kv", "hidden"):
        [value] = values(tier, [0], part)
        assert is_intact(header.parts[part], value or b"")
    tier.replace([second])
    assert values(tier, [0]) == [value_of(second, "kv")]
    assert tier.usage().bytes_used == second.nbytes


def test_hints_lead_to_the_last_page_and_go_with_it(tier: DiskTier) -> None:
    tier.put([make_page(0, {"kv": 10}, hints=[1, 2]), make_page(1, {"kv": 10}, hints=[2])])
    hints = [hint_of(1), hint_of(2), hint_of(3)]
    assert tier.resolve(hints) == [key_of(0), key_of(1), None]
    tier.drop([key_of(0)])
    assert tier.resolve(hints) == [None, key_of(1), None]
    tier.drop([key_of(1)], "kv")
    assert tier.resolve(hints) == [None, None, None], "a page without parts is gone"


def test_views_are_not_copies_and_do_not_outlast_the_next(tier: DiskTier) -> None:
    tier.put([make_page(i, {"kv": 100_000}) for i in range(2)])
    views = tier.get([key_of(0), key_of(1)], "kv")
    first = next(views)
    assert first is not None
    assert first.readonly
    next(views)
    with pytest.raises(ValueError, match="released"):
        bytes(first)


# Several users.


def test_closing_waits_for_whoever_reads(folder: Path) -> None:
    tier = DiskTier(folder, 16 * MIB)
    page = make_page(0, {"kv": MIB})
    tier.put([page, make_page(1, {"kv": 10})])
    views = tier.get([key_of(0), key_of(1)], "kv")
    view = next(views)
    tier.close()
    assert view is not None
    assert bytes(view) == value_of(page, "kv"), "the file is still mapped"
    views.close()
    for method in (
        lambda: tier.contains([]),
        lambda: tier.put([page]),
        lambda: list(tier.get([key_of(0)], "kv")),
        tier.usage,
    ):
        with pytest.raises(TierError, match="closed"):
            method()


def test_two_tiers_of_one_process_share_the_file(tier: DiskTier, folder: Path) -> None:
    other = DiskTier(folder, 16 * MIB)
    other.put([make_page(0, {"kv": 10})])
    other.close()
    assert names(tier) == [0]
    with pytest.raises(CacheConfigError, match=r"open with 16\.0 MiB already"):
        DiskTier(folder, 8 * MIB)


def test_threads_and_processes_at_once(tier: DiskTier, folder: Path) -> None:
    code = """
for i in range(200):
    n = int(sys.argv[2]) + i % 60
    tier.put([make_page(n, {"kv": 50_000 + n, "hidden": 1000})])
    for k in range(100, 300, 7):
        for view in tier.get([key_of(k)], "kv"):
            assert view is None or bytes(view) == value_of(make_page(k, {"kv": 50_000 + k}), "kv")
"""
    failures: list[BaseException] = []

    def read() -> None:
        try:
            for round in range(300):
                index = 100 + round % 200
                [value] = values(tier, [index])
                assert value in (None, value_of(make_page(index, {"kv": 50_000 + index}), "kv"))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    code = "tier = DiskTier(sys.argv[1], 16 * 2**20)" + code
    head = "import sys\nfrom tailreplay.tiers.disk import DiskTier\nfrom tests.tiers.pages import *\n"
    children = [subprocess.Popen([sys.executable, "-c", head + code, str(folder), str(at)]) for at in (100, 200)]
    assert [child.wait(120) for child in children] == [0, 0]
    for thread in threads:
        thread.join()
    assert not failures
    usage = tier.usage()
    assert usage.pages == len(names(tier)) == 120
    assert usage.bytes_used == sum(entry.nbytes for entry in tier.entries())


def test_a_child_opens_the_file_anew(tier: DiskTier) -> None:
    tier.put([make_page(0, {"kv": 10})])
    child = os.fork()
    if not child:
        status = 1
        try:
            tier.put([make_page(1, {"kv": 10})])
            status = int(sorted(names(tier)) != [0, 1])
            tier.close()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert sorted(names(tier)) == [0, 1]
    tier.put([make_page(2, {"kv": 10})])


def test_a_killed_readers_slot_is_used_again(tier: DiskTier, folder: Path) -> None:
    tier.put([make_page(i, {"kv": 300_000}) for i in range(40)])
    code = "import os\nviews = DiskTier(sys.argv[1]).get([key_of(1)], 'kv')\nnext(views)\nos.kill(os.getpid(), 9)"
    assert in_child(code, folder, check=False).returncode == -9
    # Its snapshot would keep every page from being used again.
    for i in range(100, 200):
        tier.put([make_page(i, {"kv": 300_000})])
    assert names(tier)[-1] == 199


def test_opening_does_not_depend_on_the_number_of_pages(folder: Path) -> None:
    tier = DiskTier(folder, 1024 * MIB)
    for at in range(0, 100_000, 5000):
        tier.put([TierPage(key_of(i), b"header", {"kv": [b"kv"], "hidden": [b"hidden"]}) for i in range(at, at + 5000)])
    tier.close()
    took = []
    for _ in range(5):
        begin = time.perf_counter()
        tier = DiskTier(folder, 1024 * MIB)
        assert tier.usage().pages == 100_000
        took.append(time.perf_counter() - begin)
        tier.close()
    assert min(took) < 0.050


# Damage.


def filled(folder: Path) -> None:
    tier = DiskTier(folder, 16 * MIB)
    tier.put([make_page(i, {"kv": 50_000}) for i in range(100)])
    tier.close()


@pytest.mark.parametrize("left", [100, 4096, 5000, 20_000, 3_000_000])
def test_a_truncated_file_is_moved_aside(folder: Path, left: int) -> None:
    filled(folder)
    os.truncate(folder / DATA, left)
    code = """
import logging
logging.basicConfig()
tier = DiskTier(sys.argv[1], 2**24)
tier.put([make_page(0, {"kv": 10})])
print(tier.usage().pages)
"""
    done = in_child(code, folder)
    assert done.stdout == "1\n"
    assert done.stderr.count("\n") == 1
    assert "is damaged" in done.stderr
    assert "starts empty" in done.stderr
    assert (folder / DAMAGED).stat().st_size == left


def test_garbage_is_moved_aside_but_not_by_who_only_looks(folder: Path) -> None:
    folder.mkdir()
    (folder / DATA).write_bytes(random.Random(0).randbytes(100_000))
    with pytest.raises(CacheConfigError, match="it is no LMDB file"):
        DiskTier(folder)
    DiskTier(folder, 16 * MIB).close()
    (folder / DATA).write_bytes(b"garbage again" * 1000)
    DiskTier(folder, 16 * MIB).close()
    assert (folder / DAMAGED).read_bytes() == b"garbage again" * 1000, "one is kept"


@pytest.mark.parametrize("seed", range(6))
def test_overwritten_bytes_never_pass_for_a_page(folder: Path, seed: int) -> None:
    """Somewhere in the middle: what comes back is right, or found to be damaged, or the tier says that it cannot."""
    filled(folder)
    draw = random.Random(seed)
    with (folder / DATA).open("r+b") as file:
        size = file.seek(0, 2)
        for _ in range(3):
            file.seek(draw.randrange(8192, size - 50_000))
            file.write(draw.randbytes(draw.choice([1, 100, 40_000])))
    code = """
from tailreplay.tiers.base import TierError
from tailreplay.page_format import *
from tailreplay.errors import TailReplayError
try:
    tier = DiskTier(sys.argv[1], 2**24)
    for key, header, parts in list(tier.headers()):
        for view in tier.get([key], "kv"):
            try: fine = view is None or is_intact(unpack_header(header).parts["kv"], view)
            except PageFormatError: fine = False
            index = int.from_bytes(key[4:], "big")
            assert not fine or bytes(view) == value_of(make_page(index, {"kv": 50_000}), "kv")
except TailReplayError as error:
    print(error)
print("done")
"""
    done = in_child(code, folder, check=False)
    if done.returncode >= 0:
        assert done.stdout.endswith("done\n"), done.stderr


def test_errors_while_it_runs_are_the_tiers(tier: DiskTier) -> None:
    class Broken:
        def begin(self, **_: object) -> None:
            raise lmdb.CorruptedError("made up")

    whole, tier._opened._env = tier._opened._env, Broken()
    with pytest.raises(TierError, match="failed"):
        tier.contains([key_of(0)])
    with pytest.raises(TierError, match="failed"):
        tier.put([make_page(0, {"kv": 10})])
    tier._opened._env = whole
    tier.put([make_page(0, {"kv": 10})])
    tier.close()
    again = DiskTier(tier.path, 16 * MIB)
    assert names(again) == [], "a file that was found damaged is not used again"
    again.put([make_page(0, {"kv": 10})])
    again.close()
    assert (tier.path / DAMAGED).exists()
    reopened = DiskTier(tier.path, 16 * MIB)
    assert names(reopened) == [0]
    reopened.close()


def test_a_file_that_is_damaged_leaves_the_log_one_line(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.mkdir()
    (folder / DATA).write_bytes(b"garbage" * 1000)
    with caplog.at_level(logging.WARNING, "tailreplay"):
        DiskTier(folder, 16 * MIB).close()
    [record] = caplog.records
    assert "data.mdb.damaged" in record.getMessage()
