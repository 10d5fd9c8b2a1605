"""The report of `tailreplay bench peers` as bars."""

from __future__ import annotations

from typing import Any

_COLOURS = ("#bbbbbb", "#4477aa", "#228833", "#ccaa00", "#cc3311", "#aa3377")


def draw(figure: Any, rows: list[dict[str, Any]]) -> None:
    """Draw, by pattern and server, the share of reusable tokens that was reused, and the median time to first token."""
    shown = [row for row in rows if row["ideal"]]
    patterns = list(dict.fromkeys(row["pattern"] for row in shown))
    servers = list(dict.fromkeys(row["server"] for row in shown))
    share, latency = figure.subplots(1, 2, sharey=True)
    height = 0.8 / max(len(servers), 1)
    for at, server in enumerate(servers):
        mine = {row["pattern"]: row for row in shown if row["server"] == server}
        places = [place + at * height for place, pattern in enumerate(patterns) if pattern in mine]
        here = [mine[pattern] for pattern in patterns if pattern in mine]
        look = {"height": height, "color": _COLOURS[at % len(_COLOURS)], "label": server}
        share.barh(places, [row["ratio"] or 0 for row in here], **look)
        latency.barh(places, [row["ttft_p50_ms"] or 0 for row in here], **look)
    share.set_yticks([place + 0.4 - height / 2 for place in range(len(patterns))], patterns)
    share.invert_yaxis()
    share.set_xlabel("reused, of what an ideal cache has")
    share.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    latency.set_xlabel("TTFT p50 of requests with something to reuse, ms")
    if servers:
        latency.legend(fontsize="small")
