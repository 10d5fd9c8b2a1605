"""Files that benchmarks write, and packages that they need: looked at before anything is measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from tailreplay.errors import InvalidRequestError, TailReplayError


def writable(path: Path) -> Path:
    """Return `path` after making sure that it can be written: before hours of measuring, not after.

    Makes the folder that it lies in.

    Raises
    ------
    InvalidRequestError
        If it cannot.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        path.open("a").close()
        if new:
            path.unlink()  # nothing is left behind if nothing is measured
    except OSError as error:
        raise InvalidRequestError(f"'{path}' cannot be written: {error.strerror}.") from error
    return path


def append(path: Path, record: dict[str, Any]) -> None:
    """Write a record to the end of the file, as a line of JSON; after a line that was cut off it begins a new one."""
    with path.open("ab+") as file:
        cut_off = False
        if file.seek(0, 2):
            file.seek(-1, 2)
            cut_off = file.read(1) != b"\n"
        file.write(b"\n" * cut_off + json.dumps(record, allow_nan=False).encode() + b"\n")


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Turn what the system says of a file that it cannot write after all into one sentence."""
    try:
        yield
    except OSError as error:
        raise TailReplayError(f"'{path}' could not be written: {error.strerror or error}.") from error


def require(*modules: str) -> None:
    """Import modules.

    Raises
    ------
    TailReplayError
        If a package is not installed.
    """
    for module in modules:
        try:
            import_module(module)
        except ModuleNotFoundError as error:
            raise TailReplayError(f"This benchmark needs {error.name}: pip install 'tailreplay[bench]'.") from None


def require_for(pictures: bool, tables: bool) -> None:
    """Raise `TailReplayError` if what draws pictures or prints tables is wanted and not installed."""
    require(*["matplotlib.figure"] * pictures, *["rich.table"] * tables)
