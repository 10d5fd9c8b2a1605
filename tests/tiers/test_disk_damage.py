"""The disk tier: files that are cut off or overwritten."""

from __future__ import annotations

import logging
import os
import random
from pathlib import Path

import lmdb
import pytest

from tailreplay.errors import CacheConfigError
from tailreplay.tiers.base import TierError
from tailreplay.tiers.disk import DiskTier
from tailreplay.tiers.disk.file import DAMAGED, DATA
from tests.tiers.looking import MIB, in_child, names
from tests.tiers.pages import key_of, make_page


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


def test_damaged_roots_are_moved_aside_at_the_next_start(folder: Path) -> None:
    """Where a table begins: LMDB only says that the transaction is bad."""
    filled(folder)
    tier = DiskTier(folder, 16 * MIB)
    size = (folder / DATA).stat().st_size
    with (folder / DATA).open("r+b") as file:
        for at in range(2 * 4096, size, 4096):
            file.seek(at)
            file.write(b"\xa5" * 600)
    with pytest.raises(TierError):
        tier.contains([key_of(0)])
    tier.close()
    tier = DiskTier(folder, 16 * MIB)
    assert (folder / DAMAGED).exists()
    tier.put([make_page(0, {"kv": 10})])
    assert tier.usage().pages == 1
    tier.close()
