"""The disk tier: its folder, and what putting pages does."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import lmdb
import pytest

from tailreplay.errors import CacheConfigError
from tailreplay.page_format import is_intact, unpack_header
from tailreplay.tiers.disk import DiskTier, default_path
from tailreplay.tiers.disk.file import DATA
from tests.tiers.looking import MIB, in_child, values
from tests.tiers.pages import TENANTS, hint_of, key_of, make_page, value_of


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
