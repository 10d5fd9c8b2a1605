"""The HTML report of `bench ttft`: it needs nothing else, and says what the rows say."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tailreplay.ablation import ABLATIONS
from tailreplay.bench import ttft_report
from tailreplay.bench.ttft_report.grids import SPLIT, TIMES
from tailreplay.bench.ttft_saved import report_of
from tests.core.made_ttft import records

_LOADS = ("src", "href", "xlink:href", "srcset", "data", "action", "poster")


class Page(HTMLParser):
    """Collects tables, ids, and what a browser would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.data = ""
        self._within = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        named = dict(attrs)
        self.ids.append(named.get("id") or "")
        self.loads += [value or "" for name, value in attrs if name in _LOADS]
        self.loads += [found for _, value in attrs for found in re.findall(r"url\(([^)]*)\)", value or "")]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        self._within = tag

    def handle_endtag(self, tag: str) -> None:
        self._within = ""

    def handle_data(self, data: str) -> None:
        if self._within in ("td", "th"):
            self.tables[-1][-1][-1] += data
        elif self._within == "script":
            self.data += data
        elif self._within == "style":
            self.loads += re.findall(r"url\(([^)]*)\)|@import", data)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return report_of(records())


@pytest.fixture(scope="module")
def page(report: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Page:
    path: Path = tmp_path_factory.mktemp("report") / "report.html"
    ttft_report.write_html(report, path)
    return Page(path.read_text(encoding="utf-8"))


def test_the_page_loads_nothing(page: Page) -> None:
    assert page.loads
    assert all(address.startswith("#") for address in page.loads)
    assert not {"link", "img", "iframe", "object", "image"} & set(page.tags)


def test_every_row_has_its_point(page: Page, report: dict[str, Any]) -> None:
    assert page.tags.count("svg") == 1
    points = [name for name in page.ids if name.startswith("row-")]
    assert sorted(points) == sorted(f"row-{place}" for place in range(len(report["rows"])))
    named = [name for name in page.ids if name]
    assert len(named) == len(set(named))


def test_the_tables_say_what_the_rows_say(page: Page, report: dict[str, Any]) -> None:
    engines = ("transformers", "vllm")
    times, split = page.tables[:2], page.tables[2:4]
    for tables, headings, names in (
        (times, TIMES, ("full_ms", "full_mean_ms", "full_p95_ms", "hit_ms", "hit_mean_ms", "hit_p95_ms", "speedup", "limit",
                        "vs_limit")),
        (split, SPLIT, ("lookup_ms", "fetch_ms", "copy_ms", "copy_limit_ms", "replay_ms", "query_ms", "loaded_mib")),
    ):  # fmt: skip
        for engine, (heading, *lines) in zip(engines, tables, strict=True):
            assert tuple(heading) == headings
            rows = [row for row in report["rows"] if row["engine"] == engine]
            for line, row in zip(lines, rows, strict=True):
                assert line[:3] == [
                    f"{row['length']:,}",
                    f"{100 * row['ratio']:g}%",
                    ABLATIONS[row["ablation"]].label,
                ]
                for text, name in zip(line[3:], names, strict=True):
                    shown = text.rstrip("x").replace(",", "")
                    step = 10.0 ** -len(shown.partition(".")[2])
                    assert float(shown) == pytest.approx(row[name], abs=0.51 * step)


def test_the_page_carries_its_data(page: Page, report: dict[str, Any]) -> None:
    assert json.loads(page.data) == report
