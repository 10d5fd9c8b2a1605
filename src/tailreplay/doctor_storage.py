"""What stands in the way of pages on disk or on a server; a server or folder that is named is tried."""

from __future__ import annotations

import ctypes
import os
import secrets
import stat
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from tailreplay.doctor import Finding
from tailreplay.errors import CacheConfigError, TailReplayError
from tailreplay.sizes import format_bytes
from tailreplay.tiers.base import KV, Tier, TierError, TierPage
from tailreplay.tiers.guard.lanes import Lanes, Overdue

SECONDS = 15.0
MOONCAKE_LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}


def examine_storage() -> list[Finding]:
    """Say which storage can be used. What is not installed is no fault: none of it is needed without it."""
    return [_lmdb(), _redis(), _mooncake()]


def examine_remote(spec: str) -> list[Finding]:
    """Try the storage that `spec` names, as `tailreplay.tiers.factory.open_tier` reads it; takes 15 seconds at most.

    A server gets a small value and gives it back; a folder is only looked at.

    Raises
    ------
    CacheConfigError
        If `spec` is not understood, or a package is missing; one sentence.
    """
    from tailreplay.tiers import factory

    if (folder := factory.folder_of(spec)) is not None:
        return examine_folder(folder)
    tier = factory.open_tier(spec, guarded=False)
    lanes = Lanes("doctor", 1)
    try:
        return lanes.take(SECONDS).run(lambda: _try(tier), SECONDS)
    except Overdue:
        return [Finding(False, f"{spec.partition('://')[0]} has not answered in {SECONDS:.0f} s.")]
    finally:
        lanes.close()


def examine_folder(folder: Path) -> list[Finding]:
    """Say whether pages can be kept in `folder`, and whether others can read them there. Makes nothing."""
    if not folder.exists():
        above = next(parent for parent in folder.absolute().parents if parent.exists())
        if not os.access(above, os.W_OK | os.X_OK):
            return [Finding(False, f"{folder} cannot be made: {above} is not yours to write to.")]
        return [Finding(True, f"{folder} will be made when it is first used.")]
    if not folder.is_dir() or not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return [Finding(False, f"{folder} is no folder that you may write to.")]
    about = folder.stat()
    if about.st_uid != os.geteuid():
        return [Finding(False, f"{folder} belongs to another user, who can read and change your prompts' pages.")]
    if stat.S_IMODE(about.st_mode) & 0o077:
        return [Finding(False, f"{folder} can be read by other users, and pages hold prompts: chmod 700 {folder}")]
    return [Finding(True, f"{folder} is writable, and yours alone.")]


def missing_libraries() -> list[str]:
    """Return Debian's packages of those shared libraries that Mooncake needs and that do not load."""
    return [package for library, package in MOONCAKE_LIBRARIES.items() if not _loads(library)]


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _lmdb() -> Finding:
    if not _installed("lmdb"):
        return Finding(True, "lmdb is not installed, which a cache on disk needs: pip install 'tailreplay[disk]'.")
    return Finding(True, "lmdb is installed: a cache on disk will work.")


def _redis() -> Finding:
    if not _installed("redis"):
        return Finding(
            True, "redis is not installed, which a cache on Redis or Valkey needs: pip install 'tailreplay[redis]'."
        )
    return Finding(True, "redis is installed: a cache on Redis or Valkey will work; --remote redis://HOST tries one.")


def _mooncake() -> Finding:
    if not _installed("mooncake"):
        return Finding(
            True,
            "Mooncake is not installed, which a cache on it needs: pip install mooncake-transfer-engine (without CUDA: "
            "mooncake-transfer-engine-non-cuda).",
        )
    if lacking := missing_libraries():
        # Not a fault unless somebody wants to use it.
        return Finding(True, f"Mooncake is installed but does not load: apt-get install {' '.join(lacking)}.")
    return Finding(True, "Mooncake is installed, and its libraries load; --remote mooncake://HOST tries a master.")


def _try(tier: Tier) -> list[Finding]:
    try:
        found = [_round_trip(tier)]
        info: Callable[[], dict[str, object]] | None = getattr(tier, "info", None)
        if info is not None:
            found += _memory(info())
        return found
    except CacheConfigError:
        raise
    except TailReplayError as error:
        return [Finding(False, str(error))]
    finally:
        tier.close()


def _round_trip(tier: Tier) -> Finding:
    probe = TierPage(secrets.token_bytes(32), b"probe", {KV: [secrets.token_bytes(4096)]})
    # The first call connects, which takes longer than those after it.
    tier.contains([probe.key])
    began = time.perf_counter()
    tier.put([probe])
    middle = time.perf_counter()
    views = [None if view is None else bytes(view) for view in tier.get([probe.key], KV)]
    ended = time.perf_counter()
    tier.drop([probe.key])
    if views != [b"".join(probe.parts[KV])]:
        raise TierError(f"{tier!r} took 4 KiB and gave something else back.")
    storing, reading = (middle - began) * 1e3, (ended - middle) * 1e3
    return Finding(True, f"{tier!r} works: storing 4 KiB took {storing:.1f} ms, reading them {reading:.1f} ms.")


def _memory(info: dict[str, object]) -> list[Finding]:
    limit, policy = int(str(info.get("maxmemory", 0))), str(info.get("maxmemory_policy", "noeviction"))
    if limit == 0:
        return [Finding(False, "The server has no limit and grows until memory ends: CONFIG SET maxmemory 8gb.")]
    if policy != "allkeys-lru":
        return [Finding(False, f"The server's maxmemory-policy is {policy}: CONFIG SET maxmemory-policy allkeys-lru.")]
    return [Finding(True, f"The server holds {format_bytes(limit)} and evicts what was used longest ago.")]
