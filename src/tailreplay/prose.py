"""Some pages of English prose that are everywhere: what Python's own modules say of themselves."""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_MODULES = (
    *("doctest", "difflib", "string", "argparse", "logging", "optparse", "pickletools", "threading"),
    *("tempfile", "random", "turtle", "statistics", "zipfile", "shlex", "csv", "ast", "datetime"),
)


@cache
def calibration_text() -> str:
    """Return the text from which a model's mean state is taken; it is in no evaluation task.

    Modules that a build of Python lacks are left out.
    """
    return "\n\n".join(" ".join(text.split()) for text in map(_docstring, _MODULES) if text)


def _docstring(module: str) -> str:
    """Return what a module's source says first. It is not imported: `turtle`, say, needs a display's library."""
    spec = find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return ""
    try:
        return ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ""
