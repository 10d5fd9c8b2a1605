"""Fetches the packages that hold the text, and checks that they are the ones that the run was designed with."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).with_name("sources.toml")


@dataclass(frozen=True)
class Source:
    """A package with text in it; see sources.toml."""

    name: str
    index: str
    package: str
    version: str
    sha256: str
    licence: str
    format: str
    files: list[str]
    skip: list[str]


def load_sources(path: Path = SOURCES) -> list[Source]:
    """Return the sources, in the file's order."""
    return [Source(**entry) for entry in tomllib.loads(path.read_text(encoding="utf-8"))["sources"]]


def fetch(source: Source, folder: Path, accept_changed: bool = False) -> tuple[Path, str]:
    """Download and unpack a package, unless that was done before.

    Parameters
    ----------
    source : Source
    folder : Path
        Where downloads and their contents are kept.
    accept_changed : bool
        Take the distribution's current version where the pinned one is gone. The result is then no more the same run.

    Returns
    -------
    Path
        Folder with the contents.
    str
        SHA-256 of what was downloaded.

    Raises
    ------
    SystemExit
        With one sentence, if the package cannot be had or is another one.
    """
    archive = _download(source, folder / "packages" / source.name, accept_changed)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != source.sha256 and not accept_changed:
        raise SystemExit(
            f"{archive.name} has another SHA-256 than {SOURCES.name} says; --accept-changed takes it all the same."
        )
    target = folder / "contents" / f"{source.name}-{digest[:12]}"
    if not target.exists():
        partial = target.with_suffix(".partial")
        partial.mkdir(parents=True, exist_ok=True)
        if archive.suffix == ".deb":
            subprocess.run(["dpkg-deb", "-x", archive, partial], check=True)
        else:
            with tarfile.open(archive) as tar:
                tar.extractall(partial, filter="data")
        partial.rename(target)
    return target, digest


def _download(source: Source, folder: Path, accept_changed: bool) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if found := sorted(folder.glob("*.deb")) + sorted(folder.glob("*.tar.gz")):
        return found[0]
    if source.index == "debian":
        commands = [["apt-get", "download", "-qq", f"{source.package}={source.version}"]]
        if accept_changed:
            commands.append(["apt-get", "download", "-qq", source.package])
    else:
        wanted = f"{source.package}=={source.version}"
        # The source archive, not the wheel: wheels have no documentation.
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
        commands = [[*pip, "--no-deps", "--no-binary", ":all:", wanted]]
    for command in commands:
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
        except FileNotFoundError:
            raise SystemExit(f"{command[0]} is needed to fetch {source.package}.") from None
        except subprocess.CalledProcessError:
            continue
        return (sorted(folder.glob("*.deb")) + sorted(folder.glob("*.tar.gz")))[0]
    raise SystemExit(
        f"{source.package} {source.version} cannot be fetched: run 'apt-get update', or take the version that there is "
        "with --accept-changed."
    )
