"""Where models are loaded from, and what is said when they are not there."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tailreplay.errors import UnsupportedModelError

BUNDLED = Path(__file__).resolve().parent / "bundled"
_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")


def model_path(model: str | os.PathLike[str]) -> str:
    """Return where to load `model` from: "bundled" is the small model inside the package, else a path or a hub id.

    Raises
    ------
    UnsupportedModelError
        If it is neither a path that exists nor looks like a hub id.
    """
    name = str(model)
    if name == "bundled":
        return str(BUNDLED)
    if not os.path.exists(name) and not _HUB_ID.fullmatch(name):
        raise UnsupportedModelError(f"There is no model folder '{name}' (and a hub id looks like 'owner/name').")
    return name


@contextmanager
def load_errors(model: str | os.PathLike[str]) -> Iterator[None]:
    """Turn what the library raises for a model that is not there or not known into one sentence."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        # The library explains itself in paragraphs; what went wrong is in the first sentence.
        reason = re.split(r"(?<=\w)\.\s|\n", str(error).strip() or type(error).__name__)[0].rstrip(".")
        raise UnsupportedModelError(f"The model '{model}' could not be loaded: {reason}.") from error
