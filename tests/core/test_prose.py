"""The text of the mean state: there on every Python, and nothing is imported for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tailreplay import prose


def test_there_is_enough_text_and_no_module_is_run_for_it() -> None:
    code = (
        "import sys; sys.modules['tkinter'] = None\n"
        "from tailreplay.prose import calibration_text\n"
        "text = calibration_text()\n"
        "print(len(text), 'turtle' in sys.modules, 'optparse' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    length, *imported = done.stdout.split()
    # More than 2,048 tokens of four characters.
    assert int(length) > 12_000
    assert imported == ["False", "False"]


def test_modules_that_are_not_there_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prose, "_MODULES", ("shlex", "no_such_module", "sys"))
    monkeypatch.setattr(prose, "calibration_text", prose.calibration_text.__wrapped__)
    assert prose.calibration_text() == "A lexical analyzer class for simple shell-like syntaxes."
