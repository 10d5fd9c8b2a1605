"""`tailreplay cache`: what it says, what it changes, and the status that it returns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tailreplay.cli import main
from tailreplay.provenance import Provenance
from tailreplay.tiers.base import TierPage
from tailreplay.tiers.disk import DiskTier
from tests.tiers.pages import TENANTS, key_of, make_page, value_of

MIB = 2**20
OTHER = b"o" * 32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache of a chain of ten pages, and of two more in another namespace."""
    folder = tmp_path / "cache"
    tier = DiskTier(folder, 16 * MIB)
    tier.put(chain())
    sizes = {"kv": 2000}
    tier.put([make_page(i, sizes, tenant=TENANTS[1], namespace=OTHER, created=6.0, label="large") for i in (20, 21)])
    tier.close()
    return folder


def chain() -> list[TierPage]:
    return [
        make_page(
            i,
            {"kv": 10_000, "hidden": 5000} if i < 8 else {"kv": 10_000},
            hints=[i],
            provenance=Provenance(1 if i == 9 else 0),
            parent=i - 1 if i else None,
            created=time.time() - 7200,
        )
        for i in range(10)
    ]


def said(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: object, status: int = 0) -> str:
    action, *rest = map(str, arguments)
    assert main(["cache", action, "--path", str(folder), *rest]) == status
    shown = capsys.readouterr()
    return shown.out if status != 2 else shown.err


def indices(folder: Path) -> set[int]:
    tier = DiskTier(folder)
    found = {int.from_bytes(key[4:], "big") for key, _, _ in tier.headers()}
    tier.close()
    return found


def damage(folder: Path, index: int, table: str = "kv") -> None:
    tier = DiskTier(folder)
    with tier._opened.write() as txn:
        data = bytes(txn.get(key_of(index), db=getattr(tier._opened.tables, table)))
        txn.put(key_of(index), data[:-1] + b"?", db=getattr(tier._opened.tables, table))
    tier.close()


def test_ls(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, folder, "ls")
    assert "tiny" in shown
    assert "9 exact" in shown
    assert "approximate" in shown
    first, second = json.loads(said(capsys, folder, "ls", "--json"))
    assert (first["namespace"], first["pages"], first["tokens"], first["page_tokens"]) == (
        (b"n" * 32).hex(),
        10,
        160,
        16,
    )
    assert (first["kv_bytes"], first["hidden_bytes"]) == (100_000, 40_000)
    assert first["provenance"] == {"exact": 9, "approximate (depth 1)": 1}
    assert (second["label"], second["pages"], second["tenant"], second["created"]) == (
        "large",
        2,
        TENANTS[1].hex(),
        6.0,
    )


def test_ls_of_pages(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, folder, "ls", "--pages")
    assert "144-160" in shown
    rows = json.loads(said(capsys, folder, "ls", "--pages", "--json"))
    assert len(rows) == 12
    assert {row["key"]: row["parts"] for row in rows}[key_of(9).hex()] == ["kv"]
    damage(folder, 3, "header")
    assert "unreadable" in said(capsys, folder, "ls", "--pages")
    assert "unreadable" in said(capsys, folder, "ls")


def test_stats(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "12 pages" in said(capsys, folder, "stats")
    report = json.loads(said(capsys, folder, "stats", "--json"))
    assert report["bytes_limit"] == 16 * MIB
    assert report["pages"] == 12
    assert sum(report["by_tenant"].values()) == report["bytes_used"]
    assert report["file_bytes"] == os.path.getsize(folder / "data.mdb")


def test_verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order = [row["key"] for row in json.loads(said(capsys, folder, "ls", "--pages", "--json"))]
    assert said(capsys, folder, "verify").startswith("12 pages, 0 of them damaged, 0 without the page before them")
    damage(folder, 3)
    damage(folder, 5, "header")
    assert said(capsys, folder, "verify", status=1).startswith("12 pages, 2 of them damaged, 2 without")
    assert order == [row["key"] for row in json.loads(said(capsys, folder, "ls", "--pages", "--json"))], (
        "looking is no use"
    )
    assert "2 damaged pages were removed" in said(capsys, folder, "verify", "--drop")
    assert said(capsys, folder, "verify").startswith("10 pages, 0 of them damaged, 2 without")


def test_prune(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Say what to prune" in said(capsys, folder, "prune", status=2)
    assert "is not a time" in said(capsys, folder, "prune", "--older-than", "7 days", status=2)
    assert "is not a size" in said(capsys, folder, "prune", "--to", "much", status=2)
    assert said(capsys, folder, "prune", "--older-than", "1d") == "Removed 0 pages, 0 B.\n"
    size = os.path.getsize(folder / "data.mdb")
    assert said(capsys, folder, "prune", "--to", "70KiB").startswith("Removed 6 pages")
    assert indices(folder) == {0, 1, 2, 3, 20, 21}, "the end of the chain goes first"
    assert os.path.getsize(folder / "data.mdb") < size
    assert said(capsys, folder, "prune", "--namespace", OTHER.hex()[:6]).startswith("Removed 2 pages")
    assert indices(folder) == {0, 1, 2, 3}
    time.sleep(0.01)
    assert said(capsys, folder, "prune", "--older-than", "0.005s", "--to", "1KiB").startswith("Removed 4 pages")
    assert said(capsys, folder, "prune", "--all").startswith("Removed 0 pages")
    assert said(capsys, folder, "ls") == "The cache is empty.\n"


def test_export_and_import(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, new = tmp_path / "pages", tmp_path / "new"
    assert said(capsys, folder, "export", file).startswith("Wrote 12 pages")
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir() if "part" in path.name] == []
    assert "add --limit" in said(capsys, new, "import", file, status=2)
    assert said(capsys, new, "import", file, "--limit", "32MiB") == "Imported 12 pages.\n"
    rows = [json.loads(said(capsys, path, "ls", "--pages", "--json")) for path in (folder, new)]
    for row in [*rows[0], *rows[1]]:
        del row["used"]
    assert rows[0] == rows[1]
    tier = DiskTier(new)
    pages = chain()
    for part in ("kv", "hidden"):
        got = [None if view is None else bytes(view) for view in tier.get([page.key for page in pages], part)]
        assert got == [value_of(page, part) if part in page.parts else None for page in pages]
    assert tier.resolve(pages[4].hints) == [pages[4].key]
    assert tier.limit == 32 * MIB
    tier.close()
    assert said(capsys, folder, "export", file, "--namespace", OTHER.hex()[:4]).startswith("Wrote 2 pages")


def test_an_import_takes_nothing_damaged(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "pages"
    said(capsys, folder, "export", file)
    whole = file.read_bytes()
    for at in range(0, len(whole), 997):
        new = tmp_path / f"new{at}"
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        error = said(capsys, new, "import", file, "--limit", "4MiB", status=2)
        assert error.count("\n") == 1
        assert "pages were imported" in error
        assert said(capsys, new, "verify").split()[2] == "0"
        file.write_bytes(whole[:at])
        assert "pages were imported" in said(capsys, new, "import", file, status=2)
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"PK\3\4 something else")
    assert "is no file that 'tailreplay cache export' wrote" in said(capsys, folder, "import", foreign, status=2)
    assert "cannot be read: No such file" in said(capsys, folder, "import", tmp_path / "none", status=2)
    assert "cannot be written" in said(capsys, folder, "export", tmp_path / "none" / "pages", status=2)
    assert len(indices(folder)) == 12


def test_an_export_leaves_damaged_pages_out(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(folder, 3)
    assert said(capsys, folder, "export", tmp_path / "pages").startswith("Wrote 11 pages")


def test_no_cache_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for action in ("ls", "stats", "verify"):
        assert (
            said(capsys, tmp_path / "none", action, status=2)
            == f"tailreplay: There is no cache in '{tmp_path}/none'.\n"
        )
    assert not (tmp_path / "none").exists()


def test_while_a_server_uses_the_folder(folder: Path) -> None:
    tier = DiskTier(folder, 16 * MIB)
    views = tier.get([key_of(0), key_of(1)], "kv")
    next(views)

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "tailreplay.cli", "cache", *arguments, "--path", str(folder)]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    assert run("verify").startswith("12 pages, 0 of them damaged")
    assert "the room is used again" in run("prune", "--namespace", OTHER.hex())
    assert next(views) == value_of(chain()[1], "kv")
    views.close()
    tier.put([make_page(30, {"kv": 100})])
    assert json.loads(run("stats", "--json"))["pages"] == 11
    tier.close()


@pytest.mark.parametrize("name", ["~nobody-of-that-name/x", "x" * 300, "a\0b"])
def test_a_folder_that_cannot_be_is_one_sentence(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "ls", "--path", name]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("kind", ["pipe", "folder", "nameless", "long"])
def test_an_export_replaces_nothing_but_files(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """A rename over a device takes it from the whole machine."""
    target = {"pipe": tmp_path / "pipe", "folder": tmp_path, "nameless": Path("/"), "long": tmp_path / ("x" * 300)}[
        kind
    ]
    if kind == "pipe":
        os.mkfifo(target)
    assert main(["cache", "export", str(target), "--path", str(folder)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert kind != "pipe" or target.is_fifo()
