"""What the doctor says of storage: packages, folders, servers."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tailreplay import doctor_storage
from tailreplay.cli import main
from tailreplay.doctor_storage import examine_folder, examine_remote, examine_storage
from tests.tiers import servers
from tests.tiers.conftest import require


def test_what_is_missing_is_said_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_storage, "find_spec", lambda name: None)
    texts = [finding.text for finding in examine_storage()]
    assert [text.split(" is not installed")[0] for text in texts] == ["lmdb", "redis", "Mooncake"]
    assert all("pip install" in text for text in texts)
    assert all(finding.good for finding in examine_storage())


def test_mooncake_without_its_shared_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_storage, "find_spec", lambda name: name)
    monkeypatch.setattr(doctor_storage, "MOONCAKE_LIBRARIES", {"libnone.so.9": "libnone9", "libc.so.6": "libc6"})
    assert examine_storage()[-1].text == "Mooncake is installed but does not load: apt-get install libnone9."


def test_folders(tmp_path: Path) -> None:
    (new, private, open_) = (tmp_path / "a" / "b", tmp_path / "private", tmp_path / "open")
    private.mkdir(mode=0o700)
    open_.mkdir()
    open_.chmod(0o755)
    (tmp_path / "file").touch()
    expected = [
        (new, True, "will be made"),
        (private, True, "yours alone"),
        (open_, False, f"chmod 700 {open_}"),
        (tmp_path / "file", False, "no folder"),
    ]
    for folder, good, text in expected:
        (finding,) = examine_folder(folder)
        assert (finding.good, text in finding.text) == (good, True), finding
    (finding,) = examine_remote(f"disk:{private}")
    assert finding.good
    assert not new.exists()


def test_a_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    (finding,) = examine_folder(tmp_path / "theirs")
    assert not finding.good


def test_a_redis_that_works(redis_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--remote", f"redis://127.0.0.1:{redis_port}/7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"ok  RedisTier\(Redis at 127.0.0.1:\d+\) works: storing 4 KiB took [\d.]+ ms, reading them [\d.]+ ms\.",
        lines[0],
    )
    assert lines[1] == "ok  The server holds 64.0 MiB and evicts what was used longest ago."


def test_a_redis_without_limits(tmp_path: Path) -> None:
    require("redis")
    server = servers.redis_server(tmp_path, maxmemory="0")
    try:
        texts = [found.text for found in examine_remote(f"redis://127.0.0.1:{server.ports[0]}") if not found.good]
        assert len(texts) == 1
        assert "CONFIG SET maxmemory" in texts[0]
    finally:
        server.kill()


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    require("mooncake")
    for scheme in ("redis", "mooncake"):
        assert main(["doctor", "--remote", f"{scheme}://127.0.0.1:{servers.free_port()}"]) == 1
        assert capsys.readouterr().out.startswith("BAD ")
    assert main(["doctor", "--remote", "ftp://host"]) == 2
    assert "is no storage" in capsys.readouterr().err


def test_a_mooncake_that_works_and_one_that_has_no_memory(mooncake_port: int) -> None:
    (finding,) = examine_remote(f"mooncake://127.0.0.1:{mooncake_port}?lend=16MiB&buffer=4MiB")
    assert finding.good
    assert "reading them" in finding.text


def test_a_mooncake_to_which_nobody_lends(tmp_path: Path) -> None:
    require("mooncake")
    server = servers.mooncake_server(tmp_path)
    try:
        (finding,) = examine_remote(f"mooncake://127.0.0.1:{server.ports[0]}?buffer=4MiB")
        assert not finding.good
        assert "nobody lends" in finding.text
    finally:
        server.kill()
