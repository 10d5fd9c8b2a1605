"""How each tier is opened, broken and mended for `contract.py`."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb

from tailreplay.tiers.base import TierError
from tailreplay.tiers.disk import DiskTier
from tests.tiers.harness import Harness
from tests.tiers.memory_tier import MemoryTier

DELAY = 0.003


class MemoryHarness(Harness):
    """The reference: everything can happen to it."""

    faults = ("error", "delay", "gone")
    limit = 1_200_000

    def open(self) -> MemoryTier:
        self.tier = MemoryTier(self.limit)
        return self.tier

    def break_(self, fault: str) -> None:
        def before(method: str) -> None:
            if fault == "delay":
                time.sleep(DELAY)
            elif fault == "gone" or method == "put":
                raise TierError("made up")

        self.tier.before = before

    def mend(self) -> None:
        self.tier.before = lambda method: None

    def corrupt(self, key: bytes, part: str, change: Callable[[bytes], bytes]) -> bool:
        page = self.tier.pages.get(key)
        if page is None or (part != "header" and part not in page.parts):
            return False
        if part == "header":
            page.header = change(page.header)
        else:
            page.parts[part] = change(page.parts[part])
        return True


class BrokenLibrary:
    """Stands before an LMDB environment whose transactions fail, or take long."""

    def __init__(self, env: Any, fault: str) -> None:
        self.env, self.fault = env, fault

    def begin(self, **options: Any) -> Any:
        if self.fault == "delay":
            time.sleep(DELAY)
            return self.env.begin(**options)
        raise lmdb.DiskError("made up")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)


class DiskHarness(Harness):
    """A folder on the local disk."""

    faults = ("error", "delay", "full")
    persists = True
    limit = 2**20 + 2**19

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tailreplay-tier-"))
        self.unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

    def open(self) -> DiskTier:
        self.tier = DiskTier(self.folder / "cache", self.limit)
        return self.tier

    def break_(self, fault: str) -> None:
        if fault == "full":
            # Writes beyond the end of the file fail, as on a full disk.
            resource.setrlimit(resource.RLIMIT_FSIZE, (max(self.tier.file_bytes, 2**18), self.unlimited[1]))
        else:
            self.tier._opened._env = BrokenLibrary(self.tier._opened._env, fault)

    def mend(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.unlimited)
        env = self.tier._opened._env
        if isinstance(env, BrokenLibrary):
            self.tier._opened._env = env.env

    def corrupt(self, key: bytes, part: str, change: Callable[[bytes], bytes]) -> bool:
        env = self.tier._opened
        with env.write() as txn:
            table = getattr(env.tables, part)
            data = txn.get(key, db=table)
            if data is None:
                return False
            txn.put(key, change(bytes(data)), db=table)
        return True

    def destroy(self) -> None:
        assert os.path.isdir(self.folder)
        shutil.rmtree(self.folder)
