"""`tailreplay bench codecs`: its rows, and that they say what they seem to."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tailreplay import HybridLM
from tailreplay.bench.codec_states import state_rows
from tailreplay.bench.codecs import error_rows
from tailreplay.cli import main
from tailreplay.codecs import CODECS, codec_of
from tests.engine.tiny_models import random_ids


def by_codec(rows: list[dict[str, Any]], **chosen: Any) -> dict[str, dict[str, Any]]:
    return {row["codec"]: row for row in rows if all(row[key] == value for key, value in chosen.items())}


def test_json_has_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    arguments = ["--widths", "300", "--tokens", "5", "9", "--repeats", "2", "--prompt", "200", "--ratios", "0.1", "1"]
    assert main(["bench", "codecs", "--json", *arguments]) == 0
    assert torch.get_num_threads() == threads
    report = json.loads(capsys.readouterr().out)
    assert len(report["speed"]) == 2 * (1 + len(CODECS))
    speed = by_codec(report["speed"], tokens=9)
    assert {name: row["token_bytes"] for name, row in speed.items()} == {
        "memcpy": 600,
        "none": 600,
        "int8": 306,
        "fp8_e4m3": 306,
    }
    assert all(row["encode_gb_s"] > 0 and row["decode_gb_s"] > 0 for row in report["speed"])
    states = by_codec(report["states"], ratio=1.0)
    assert set(states) == set(CODECS)
    assert {row["replayed"] for row in report["states"]} == {20, 200}
    assert states["none"]["worst"] == 0
    assert 0 < states["int8"]["median"] < states["fp8_e4m3"]["median"] < 0.1
    assert main(["bench", "codecs", *arguments[:7], "--prompt", "0"]) == 0
    assert "fp8_e4m3" in capsys.readouterr().out


def test_outliers_are_told_from_what_is_beside_them() -> None:
    rows = by_codec(error_rows([codec_of(name) for name in CODECS], 512))
    assert all(value == 0 for key, value in rows["none"].items() if key not in ("codec", "width"))
    assert rows["int8"]["beside_outliers"] > 0.5 > 100 * rows["int8"]["elsewhere"] / 2
    assert rows["fp8_e4m3"]["beside_outliers"] < 0.05


def test_a_whole_replay_of_hiddens_as_they_are_ends_at_the_prefill(tiny: HybridLM) -> None:
    (row,) = state_rows(tiny, random_ids(150), [codec_of("none")], [1.0])
    assert row["worst"] == 0
    assert row["to_prefill"] == row["to_prefill_lossless"] < 1e-4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--widths", "0"], "at least 1"),
        (["--ratios", "1.5"], "(0, 1]"),
        (["--prompt", "1", "--tokens", "1", "--widths", "1"], "2 to"),
    ],
)
def test_bad_input_gets_one_sentence(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["bench", "codecs", *arguments]) == 2
    assert message in capsys.readouterr().err
