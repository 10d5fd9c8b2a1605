"""Tables, picture, HTML and JSON say what the summary says."""

from __future__ import annotations

import base64
import json
import re
import struct
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tailreplay.evals.info import TaskInfo
from tailreplay.evals.report import draw, print_tables, to_json, write_html
from tailreplay.evals.report.grids import percent_interval, plus_minus, signed
from tailreplay.evals.statistics import Estimate
from tailreplay.evals.summary import Summary, summarise
from tests.evals.made import TASKS, probe, random_records, record, result

SETTINGS = {"model": "bundled", "seed": 0, "dtype": "float32", "samples": {"count": 6}, "lengths": [1024, 4096]}
PARTIAL = [
    [],
    [record("count", 0, probe(full=result(0), zero=result(0)))],
    [record("text", 0, probe(full=result(nll=2.0, first_nll=2.0)))],
    random_records(1, (1024,)),
    random_records(3)[:7],
]


@pytest.fixture(scope="module")
def summary() -> Summary:
    return summarise(random_records(6), TASKS)


def printed(summary: Summary, settings: dict[str, Any] | None = None) -> str:
    out = StringIO()
    print_tables(Console(file=out, width=160), summary, SETTINGS if settings is None else settings)
    return out.getvalue()


def test_texts_of_numbers() -> None:
    assert plus_minus(Estimate(0.5, 0.4, 0.62)) == "0.50 ±0.11"
    assert plus_minus(Estimate(0.5)) == "0.50"
    assert percent_interval(Estimate(0.963, 0.9412, 0.98)) == "96.3% [94.1, 98.0]"
    assert percent_interval(Estimate()) == "–"
    assert [signed(value) for value in (0.123, -0.004, -0.2)] == ["+0.12", "0.00", "-0.20"]


def test_tables_hold_the_numbers(summary: Summary) -> None:
    text = printed(summary)
    for row in summary.rows:
        assert plus_minus(row.score, 3) in text
        assert percent_interval(row.retention) in text
        assert percent_interval(row.nll_gap_closed) in text
    for cell in summary.cells:
        assert plus_minus(cell.score) in text
        assert signed(cell.first_nll_over_full.value, 3) in text or cell.method == "full"
    for turn in summary.turns:
        assert plus_minus(turn.score) in text
    for errors in summary.state_error:
        assert f"{errors.errors[0]:.3f}" in text
    for verdict in summary.verdicts:
        assert verdict.text[:40] in text
    assert "samples: count 6" in text
    assert "lengths: 1024, 4096" in text


def test_tables_show_clean_boundaries_last(summary: Summary) -> None:
    text = printed(summary)
    heading = text.index("Retrieval at a clean boundary: says nothing about r")
    assert text.index("Running count") < heading < text.index("Retrieval at a boundary ")
    assert "State error by layer" not in text[heading:]


def test_square_brackets_are_no_markup() -> None:
    tasks = {"count": TaskInfo("count", "Count [red]x[/red] [/]", discriminates=True)}
    text = printed(summarise([record("count", 0, probe(full=result(1)))], tasks), {"model": "[bold]m[/bold]"})
    assert "Count [red]x[/red] [/]" in text
    assert "model: [bold]m[/bold]" in text


def test_picture_is_a_png(summary: Summary, tmp_path: Path) -> None:
    draw(summary, tmp_path / "picture.png")
    data = (tmp_path / "picture.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) == (1800, 576)
    assert len(data) > 30_000


class Checker(HTMLParser):
    """Collects tags, and checks that all are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    assert not checker.open
    return checker


def test_html_is_one_file_with_everything(summary: Summary, tmp_path: Path) -> None:
    picture = b"\x89PNG picture"
    write_html(summary, SETTINGS, picture, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert check(page).links == ["data:image/png;base64," + base64.b64encode(picture).decode()]
    assert not re.search(r"https?://|url\(|@import", page)
    assert 'name="viewport"' in page
    for row in summary.rows:
        assert percent_interval(row.retention) in page
    assert "<td>float32</td>" in page
    assert page.index("Running count") < page.index("says nothing about r")


def test_html_escapes_names(tmp_path: Path) -> None:
    evil = '<script>alert("1")</script>'
    records = [record("count", 0, {"evidence": None, "results": {"full": result(1), evil: result(1)}})]
    found = summarise(records, {"count": TaskInfo("count", evil, discriminates=True)})
    write_html(found, {"model": evil, evil: [evil]}, b"", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "script" not in check(page).tags
    assert page.count("&lt;script&gt;alert(&quot;1&quot;)") >= 6
    assert "<img" not in page


@pytest.mark.parametrize("records", PARTIAL, ids=["nothing", "no gap", "full only", "one document", "goes on"])
def test_reports_of_partial_data(records: list[dict[str, Any]], tmp_path: Path) -> None:
    found = summarise(records, TASKS)
    text = printed(found)
    assert ("Nothing measured yet." in text) == (not records)
    assert "nan" not in text
    assert "None" not in text
    draw(found, tmp_path / "picture.png")
    write_html(found, SETTINGS, (tmp_path / "picture.png").read_bytes(), tmp_path / "report.html")
    check((tmp_path / "report.html").read_text(encoding="utf-8"))


def test_json_has_settings_and_no_nan(summary: Summary) -> None:
    settings = SETTINGS | {"path": Path("a/b"), "rate": float("nan"), "pair": (1, None)}
    report = json.loads(json.dumps(to_json(summary, settings), allow_nan=False))
    assert report["settings"]["path"] == "a/b"
    assert report["settings"]["rate"] == "nan"
    assert report["settings"]["pair"] == [1, None]
    assert [row["method"] for row in report["summary"]] == [row.method for row in summary.rows]
    assert report["summary"][0]["retention"] == 1.0
    assert len(report["verdicts"]) == 2
    assert {"cells", "turns", "state_error", "by_length", "documents"} < set(report)
