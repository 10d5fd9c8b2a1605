"""The report as one HTML file that needs nothing else, also on a phone."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from tailreplay.evals.report.grids import setting_lines
from tailreplay.evals.report.page import page, picture_html, section_html, settings_html
from tailreplay.evals.report.sections import sections_of
from tailreplay.evals.summary import Summary
from tailreplay.evals.verdicts import Verdict

_PICTURED = "Retention and NLL gap closed against the share replayed, and state error by layer"


def write_html(summary: Summary, settings: Mapping[str, Any], picture: bytes, path: Path) -> None:
    """Write the report to `path`.

    Parameters
    ----------
    summary : Summary
    settings : mapping
        Whatever describes the run: model, seed, dtype, samples, command line.
    picture : bytes
        The PNG file that `draw` makes; empty for a report without one.
    path : Path
    """
    first, *others = [section_html(section) for section in sections_of(summary)] or ["<p>Nothing measured yet.</p>"]
    title = f"Tail replay: what a hit keeps of {settings.get('model', 'the model')}"
    parts = [
        first,
        *map(_verdict, summary.verdicts),
        picture_html(picture, _PICTURED) if picture else "",
        *others,
        settings_html([*setting_lines(settings), ("documents", str(summary.documents))]),
    ]
    path.write_text(page(title, parts), encoding="utf-8")


def _verdict(verdict: Verdict) -> str:
    return f'<p class="verdict {verdict.word}"><strong>{verdict.word}</strong> {escape(verdict.text)}</p>'
