"""The report as one HTML file that needs nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tailreplay.bench.ttft_report.grids import sections_of
from tailreplay.bench.ttft_report.picture import picture
from tailreplay.evals.report.grids import setting_lines
from tailreplay.evals.report.page import page, section_html, settings_html

_ALT = "Speed-up and time to first token against the length of the prefix, and the phases of each hit"


def write_html(report: dict[str, Any], path: Path) -> None:
    """Write the report (see `ttft_saved.report_of`) to `path`, plots as SVG inside."""
    times, *others = map(section_html, sections_of(report))
    parts = [times, _svg(report["rows"]), *others, settings_html(settings_of(report)), _data(report)]
    path.write_text(page(f"Time to first token: {report['model']}", parts), encoding="utf-8")


def settings_of(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what describes a report's runs, as names and texts: what they share once, flags engine by engine."""
    shared = {name: value for name, value in report.items() if name not in ("rows", "runs")}
    flags = {f"{run['engine']}, {run['model']}": run["flags"] for run in report["runs"]}
    speed = {"plain copies": ", ".join(dict.fromkeys(f"{run['copy_gb_s']} GB/s" for run in report["runs"]))}
    return setting_lines({**shared, **speed, **flags})


def _svg(rows: list[dict[str, Any]]) -> str:
    text = picture(rows, "svg").decode()
    # Without the declarations of a file of its own, one of which names an address.
    element = text[text.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{_ALT}" ', 1)
    return f'<div class="wide">{element}</div>'


def _data(report: dict[str, Any]) -> str:
    """The report once more for programs."""
    text = json.dumps(report, allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="report">{text}</script>'
