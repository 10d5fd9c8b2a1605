"""The HTML report of `bench ttft` in a browser, with the network cut off."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tailreplay.bench import ttft_report
from tailreplay.bench.ttft_saved import report_of
from tests.core.made_ttft import records

_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
BROWSER = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium: install Debian's 'chromium-headless-shell', or name one in CHROMIUM"
)

# Writes what the browser made of the page to where the test finds it.
_PROBE = """<script>
const box = element => { const b = element.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; };
const seen = {
  window: innerWidth, page: document.documentElement.scrollWidth, svg: box(document.querySelector("svg")),
  points: [...document.querySelectorAll('[id^="row-"]')].map(box),
  loaded: performance.getEntriesByType("resource").length,
};
document.body.dataset.seen = JSON.stringify(seen);
</script></body>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("page") / "report.html"
    ttft_report.write_html(report_of(records()), path)
    path.write_text(path.read_text(encoding="utf-8").replace("</body>", _PROBE), encoding="utf-8")
    return path


def browse(page: Path, *options: str) -> str:
    """Run the browser on the page and return its output."""
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={page.parent / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND"]
    done = subprocess.run([*command, *options, page.as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("width", [1200, 600])
def test_the_plot_fits_the_window_and_shows_a_point_a_row(page: Path, width: int) -> None:
    document = browse(page, f"--window-size={width},2000", "--dump-dom")
    found = re.search(r'data-seen="([^"]*)"', document)
    assert found
    seen: dict[str, Any] = json.loads(unescape(found[1]))
    assert seen["loaded"] == 0
    assert seen["page"] <= seen["window"] == width
    left, top, right, bottom = seen["svg"]
    assert left >= 0
    assert right <= width
    assert right - left > 0.8 * min(width, 900)
    assert len(seen["points"]) == len(records())
    for point in seen["points"]:
        assert left < point[0] < point[2] < right
        assert top < point[1] < point[3] < bottom


def test_the_picture_of_the_page_is_not_empty(page: Path) -> None:
    from matplotlib.image import imread

    picture = page.parent / "page.png"
    browse(page, "--window-size=1000,3000", f"--screenshot={picture}")
    pixels = imread(picture)
    assert pixels.shape[:2] == (3000, 1000)
    # Ink: the dark of texts, and the green of the replay's bars.
    assert (pixels[..., :3].max(axis=-1) < 0.3).mean() > 0.005
    green = (abs(pixels[..., :3] - [0x22 / 255, 0x88 / 255, 0x33 / 255]) < 0.02).all(axis=-1)
    assert green.mean() > 0.005
