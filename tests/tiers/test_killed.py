"""A process that puts pages, killed at random moments: what it was told is stored is there, whole, and adds up."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tailreplay.page_format import is_intact, unpack_header
from tailreplay.tiers.disk import DiskTier

KILLS = int(os.environ.get("TAILREPLAY_KILLS", "5"))
LIMIT = 24 * 2**20

# Prints the pages that are stored, and the evictions by then, after each put.
CHILD = """
import random, sys
from tailreplay.tiers.disk import DiskTier
from tests.tiers.pages import make_page, key_of
tier, draw, at = DiskTier(sys.argv[1], int(sys.argv[2])), random.Random(sys.argv[3]), int(sys.argv[4])
while True:
    many = range(at, at + draw.randint(1, 6))
    at = many.stop
    pages = [make_page(i, {"kv": draw.choice([500, 40_000, 400_000]), "hidden": draw.choice([100, 90_000])}) for i in many]
    draw.choice([tier.put, tier.put, tier.replace])(pages)
    print(many.start, many.stop, tier.usage().evictions, flush=True)
    if draw.random() < 0.3:
        list(tier.get([key_of(draw.randrange(at)) for _ in range(5)], "kv"))
    if draw.random() < 0.1:
        tier.drop([key_of(many.start)], "hidden")
"""


@pytest.mark.timeout(60 + 10 * KILLS)
def test_a_killed_writer_leaves_whole_pages(tmp_path: Path) -> None:
    draw = random.Random(0)
    at, evicted = 0, 0
    told: list[int] = []
    for kill in range(KILLS):
        arguments = [str(tmp_path / "cache"), str(LIMIT), str(kill), str(at)]
        child = subprocess.Popen([sys.executable, "-c", CHILD, *arguments], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        lines = [child.stdout.readline()]
        time.sleep(draw.uniform(0, 0.5))
        child.send_signal(signal.SIGKILL)
        lines += child.stdout.read().splitlines(keepends=True)
        assert child.wait(30) == -signal.SIGKILL
        for line in (line for line in lines if line.endswith("\n")):
            start, stop, _ = map(int, line.split())
            told += range(start, stop)
        at = max(told) + 10
        evicted = check(tmp_path / "cache", told, evicted)


def check(path: Path, told: list[int], evicted: int) -> int:
    tier = DiskTier(path, LIMIT)
    there: dict[int, int] = {}
    for entry in tier.entries(oldest_first=True):
        header = unpack_header(entry.header)
        assert header.key == entry.key
        assert "kv" in entry.parts
        for part in entry.parts:
            for view in tier.get([entry.key], part):
                assert view is not None
                assert is_intact(header.parts[part], view)
        there[int.from_bytes(entry.key[4:], "big")] = entry.nbytes
    usage = tier.usage()
    assert usage.pages == len(there)
    assert usage.bytes_used == sum(there.values()) == sum(usage.by_tenant.values())
    assert usage.evictions >= evicted
    # Each page was put once: those that are not there were evicted.
    assert len(set(told) - set(there)) <= usage.evictions
    assert os.path.getsize(path / "data.mdb") <= LIMIT
    tier.close()
    return usage.evictions
