"""Some pages of English prose that are everywhere: what Python's own modules say of themselves."""

from __future__ import annotations

from importlib import import_module

_MODULES = (
    *("decimal", "doctest", "difflib", "string", "argparse", "logging", "optparse", "pickletools", "threading"),
    *("tempfile", "random", "turtle", "statistics", "zipfile", "shlex", "csv", "ast", "datetime"),
)


def calibration_text() -> str:
    """Return the text from which a model's mean state is taken; it is in no evaluation task."""
    texts = [import_module(name).__doc__ or "" for name in _MODULES]
    return "\n\n".join(" ".join(text.split()) for text in texts)
