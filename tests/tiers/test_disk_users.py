"""The disk tier: threads, processes, forks and restarts."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tailreplay.errors import CacheConfigError
from tailreplay.tiers.base import TierError, TierPage
from tailreplay.tiers.disk import DiskTier
from tests.tiers.looking import HEAD, MIB, in_child, names, values
from tests.tiers.pages import key_of, make_page, value_of


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
    children = [subprocess.Popen([sys.executable, "-c", HEAD + code, str(folder), str(at)]) for at in (100, 200)]
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
    for at in range(0, 30_000, 5000):
        tier.put([TierPage(key_of(i), b"header", {"kv": [b"kv"], "hidden": [b"hidden"]}) for i in range(at, at + 5000)])
    tier.close()
    took = []
    for _ in range(5):
        begin = time.perf_counter()
        tier = DiskTier(folder, 1024 * MIB)
        assert tier.usage().pages == 30_000
        took.append(time.perf_counter() - begin)
        tier.close()
    assert min(took) < 0.050
