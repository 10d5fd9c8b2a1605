"""HTML of reports: pages that need nothing else, also on a phone."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape

from tailreplay.evals.report.grids import Grid, Section

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; margin: 0 auto; padding: 1rem;
       max-width: 60rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
p { max-width: 45rem; } p.note { color: #555; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: .3rem; white-space: nowrap; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
thead th { white-space: normal; vertical-align: bottom; border-bottom: 2px solid #888; }
th:first-child { text-align: left; font-weight: 600; }
.settings td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
img, svg { max-width: 100%; height: auto; }
.verdict { border-left: .3rem solid; padding-left: .7rem; }
.passed { border-color: #228833; } .failed { border-color: #cc3311; } .undecided { border-color: #ccaa00; }
"""


def page(title: str, parts: Iterable[str]) -> str:
    """Return a whole page of parts that are HTML already."""
    lines = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        *parts,
        "</body></html>",
    ]
    return "\n".join(lines) + "\n"


def section_html(section: Section) -> str:
    """Return a heading, a note and tables."""
    grids = "\n".join(map(grid_html, section.grids))
    return f'<h2>{escape(section.title)}</h2>\n<p class="note">{escape(section.text)}</p>\n{grids}'


def grid_html(grid: Grid) -> str:
    """Return a table that scrolls sideways where it does not fit."""
    headings = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in grid.headings)
    rows = "\n".join(_row(row) for row in grid.rows)
    return (
        f'<div class="wide"><table><caption>{escape(grid.title)}</caption>\n'
        f"<thead><tr>{headings}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>"
    )


def _row(row: tuple[str, ...]) -> str:
    name, *texts = map(escape, row)
    return f'<tr><th scope="row">{name}</th>' + "".join(f"<td>{text}</td>" for text in texts) + "</tr>"


def settings_html(lines: Sequence[tuple[str, str]]) -> str:
    """Return the table of what describes a run."""
    rows = "\n".join(map(_row, lines))
    return f'<h2>Settings of the run</h2>\n<table class="settings"><tbody>\n{rows}\n</tbody></table>'


def picture_html(picture: bytes, text: str) -> str:
    """Return a PNG file inside the page; `text` is for those who do not see it."""
    return f'<img alt="{escape(text)}" src="data:image/png;base64,{base64.b64encode(picture).decode()}">'
