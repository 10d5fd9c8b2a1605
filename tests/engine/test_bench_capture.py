"""`tailreplay bench capture`: what it cannot measure is said before any weights are made."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from tailreplay.bench import shapes, traffic
from tailreplay.cli import main


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--shape", "round"], "Unknown shape 'round'; known are qwen3.5-0.8b,"),
        (
            ["--shape", "bundled", "--prompt", "9000"],
            "The model 'bundled' takes at most 8,192 tokens, and a prompt with",
        ),
        (["--shape", "tiny", "--generate", "999999"], "The model 'tiny' takes at most 262,144 tokens"),
        (["--model", "/no/such/model"], "no model folder '/no/such/model'"),
        (["--engine", "vllm"], "vLLM is not installed"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(
    given: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(traffic, "version", version)
    monkeypatch.setattr(shapes, "random_model", lambda *arguments: pytest.fail("made a model"))
    assert main(["bench", "capture", *given]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1
