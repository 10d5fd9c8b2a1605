"""The command line: what it says and the status that it returns."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from types import ModuleType

import pytest

from tailreplay import TailReplayError, __version__
from tailreplay.cli import COMMANDS, main
from tailreplay.commands.bench import BENCHMARKS


def command(monkeypatch: pytest.MonkeyPatch, outcome: int | BaseException) -> None:
    """Put a stand-in in the place of `tailreplay inspect` that returns or raises `outcome`."""

    def run(_: Namespace) -> int:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    module = ModuleType("tailreplay.commands.inspect")
    module.__dict__.update(parser=lambda: ArgumentParser(prog="tailreplay inspect"), run=run)
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"tailreplay {__version__}\n"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown and text in shown for name, text in COMMANDS.items())
    assert ", ".join(sorted(BENCHMARKS)) in shown


@pytest.mark.parametrize("arguments", [["nonsense"], ["--nonsense"], ["bench"], ["bench", "nonsense"]])
def test_what_is_not_a_command_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines()[-1].startswith("tailreplay")
    assert "error: " in shown.err.splitlines()[-1]


def test_no_command_shows_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)


def test_arguments_for_another_program_are_for_serve_only(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["inspect", "--", "--x"])
    assert "for 'serve --engine vllm' only" in capsys.readouterr().err
    assert main(["serve", "--", "--x"]) == 2
    assert "add --engine vllm" in capsys.readouterr().err


@pytest.mark.parametrize("status", [0, 1])
def test_a_commands_status_is_returned(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    command(monkeypatch, status)
    assert main(["inspect"]) == status


def test_errors_are_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command(monkeypatch, TailReplayError("The cup is empty."))
    assert main(["inspect"]) == 2
    assert capsys.readouterr() == ("", "tailreplay: The cup is empty.\n")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command(monkeypatch, ModuleNotFoundError("No module named 'rich'", name="rich"))
    assert main(["inspect"]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "'rich'" in shown
    assert "pip install" in shown


def test_an_interrupt_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command(monkeypatch, KeyboardInterrupt())
    assert main(["inspect"]) == 130
    assert capsys.readouterr() == ("", "")


def test_other_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    command(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main(["inspect"])
