"""`tailreplay bench peers` on real servers: what tailreplay reuses is what an ideal cache would have."""

from __future__ import annotations

import json

import pytest

from tailreplay.bench.patterns import PATTERNS
from tailreplay.cli import main

MIN_MATCH = 32


@pytest.mark.timeout(900)
def test_tailreplay_has_all_that_could_be_reused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "peers", "--scale", "0.3", "--repeats", "2", "--host-bytes", "512MiB", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    rows = {(row["server"], row["pattern"]): row for row in out["rows"]}
    assert len(rows) == 3 * len(PATTERNS)
    for record in out["records"]:
        for request in record["requests"]:
            if record["server"] == "none":
                assert request["cached"] == 0
            elif record["server"] == "tailreplay":
                ideal = request["ideal"]
                assert request["cached"] == (ideal if ideal >= MIN_MATCH else 0), record["pattern"]
    for pattern in PATTERNS:
        ours, own = rows["tailreplay", pattern], rows["own", pattern]
        # Every look-up was counted, hits as what they are.
        assert ours["exact"] + ours["approximate"] + sum(ours["misses"].values()) == ours["requests"]
        assert own["exact"] is None
        assert own["reused"] <= own["ideal"]
    assert rows["own", "same-prompt"]["reused"] > 0
