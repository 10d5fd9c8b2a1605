"""The report as one HTML file that needs nothing else, also on a phone."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from tailreplay.evals.report.grids import setting_lines
from tailreplay.evals.report.page import page, section_html, settings_html
from tailreplay.evals.report.sections import sections_of
from tailreplay.evals.summary import Summary
from tailreplay.evals.verdicts import Verdict


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
        _picture(picture) if picture else "",
        *others,
        settings_html([*setting_lines(settings), ("documents", str(summary.documents))]),
    ]
    path.write_text(page(title, parts), encoding="utf-8")


def _verdict(verdict: Verdict) -> str:
    return f'<p class="verdict {verdict.word}"><strong>{verdict.word}</strong> {escape(verdict.text)}</p>'


def _picture(picture: bytes) -> str:
    text = "Retention and NLL gap closed against the share replayed, and state error by layer"
    return f'<img alt="{text}" src="data:image/png;base64,{base64.b64encode(picture).decode()}">'
