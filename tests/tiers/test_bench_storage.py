"""`tailreplay bench storage`: its arithmetic, and that its rows are there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tailreplay.bench.page_shapes import PAGE_SHAPES
from tailreplay.bench.shape_costs import qwen35_4b
from tailreplay.bench.storage_bytes import byte_rows
from tailreplay.cli import main

SMALL = ["--shape", "tiny", "--tokens", "128", "--pages", "2", "70", "--repeats", "2", "--json"]


def rows_of(shape: str) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["kv_codec"], row["hidden_codec"]): row for row in byte_rows([shape])}


@pytest.mark.parametrize(
    ("shape", "kv", "hidden", "coded"),
    # 8 attention layers of 2 x 4 heads of 256 channels, 7 hiddens of 2,560: a scale of 2 bytes for every 128 channels
    # of hiddens. Of 27B 16 layers, and 15 hiddens of 5,120.
    [("qwen3.5-4b", 32_768, 35_840, 7 * (2560 + 80 // 2)), ("qwen3.6-27b", 65_536, 153_600, 15 * (5120 + 160 // 2))],
)
def test_bytes_of_real_shapes(shape: str, kv: int, hidden: int, coded: int) -> None:
    rows = rows_of(shape)
    plain, small = rows["none", "none"], rows["none", "int8"]
    assert (plain["kv"], plain["hidden"], plain["kv_alone"]) == (kv, hidden, kv)
    assert (small["kv"], small["hidden"]) == (kv, coded)
    assert plain["ratio"] == (kv + hidden) / kv
    assert small["ratio"] == (kv + coded) / kv
    assert small["shared"] == (kv + coded / 4) / kv
    assert small["met"] is True
    assert rows["int8", "int8"]["kv"] < 0.51 * kv
    for row in rows.values():
        stored = row["header"] + row["padding"] + 64 * (row["kv"] + row["hidden"])
        assert row["stored"] == stored / 64 / kv


def test_the_4b_shape_is_the_one_whose_costs_are_known() -> None:
    costs, layout = qwen35_4b(), PAGE_SHAPES["qwen3.5-4b"].layout()
    assert layout.kv_bytes_per_token == costs.kv_bytes
    assert layout.hidden_bytes_per_token == costs.hidden_bytes
    assert PAGE_SHAPES["qwen3.5-4b"].topology == costs.topology


def test_padding_is_counted() -> None:
    """A page of 16 tokens of 66-byte hiddens is no multiple of 64."""
    [row] = [
        row for row in byte_rows(["tiny"], page_size=16) if (row["kv_codec"], row["hidden_codec"]) == ("none", "int8")
    ]
    assert row["padding"] == -(16 * 66) % 64


def test_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "storage", "--tier", f"disk:{tmp_path}/cache?limit=64MiB", *SMALL]) == 0
    report = json.loads(capsys.readouterr().out)
    layout = PAGE_SHAPES["tiny"].layout()
    ways = {(row["place"], row["way"]) for row in report["bandwidth"]}
    assert {("host", "read"), ("host", "read, scattered"), ("disk", "get"), ("disk", "prefetch")} <= ways
    assert all(row["bytes"] == 2 * layout.page_bytes for row in report["bandwidth"])
    host, disk = report["latency"]
    assert (host["place"], host["moved"], disk["place"]) == ("host", 0, "disk")
    # Keys and values of all, and int8 hiddens of the last page.
    coded = layout.with_codecs("int8")
    assert disk["moved"] == 128 * layout.kv_bytes_per_token + coded.hidden_bytes
    assert disk["lookup_ms"] >= disk["find_ms"] + disk["get_ms"] > 0
    assert [row["pages"] for row in report["find"]] == [2, 70]


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "storage", *SMALL[:-1]]) == 0
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("qwen3.6-27b", "2.19", "memcpy", "look-up, ms", "pages in the store"))


def test_what_cannot_be_measured_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "storage", "--tokens", "100"]) != 0
    assert "multiple of 64" in capsys.readouterr().err
