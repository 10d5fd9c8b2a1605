"""Run architectures one after another and print what a hit leaves, a line of JSON each. See `test_models`."""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.vllm_live import tiny_models
from tests.vllm_live.conftest import Engine, error

IDS = [3 + i * 7919 % 997 for i in range(700)]
MATCHED, SAVED = 600, 400


def measure(architecture: str, folder: Path, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return how far states are from those of a cold run: after a hit that replays all, after
    one that begins with a saved state, after other chunks, and after no replay."""
    tiny_models.save(architecture, folder)
    engine = Engine(folder, arguments, host_bytes="64MiB", min_match=1)
    try:
        prompt = [*IDS[:MATCHED], 5]
        engine.run(IDS, chunk=SAVED, mode="off")
        engine.run([5, 6, 7], mode="off", store=False)  # a step in which the last page lands
        cold = engine.run(prompt, mode="off", store=False)
        chunked = engine.run(prompt, chunk=200, mode="off", store=False)
        hit = engine.run(prompt, mode="replay", ratio=1.0, start="zero", store=False)
        resumed = engine.run(prompt, mode="exact", store=False)
        zero = engine.run(prompt, mode="zero", store=False)
        return {
            "report": hit.report,
            "resumed_report": resumed.report,
            "hit": error(hit, cold),
            "resumed": error(resumed, cold),
            "floor": error(chunked, cold),
            "zero": error(zero, cold),
            "states": len(hit.states),
        }
    finally:
        engine.close()


def main() -> None:
    for architecture in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                outcome = measure(architecture, Path(folder))
            except Exception as wrong:
                outcome = {"failed": f"{type(wrong).__name__}: {wrong}"}
        print(json.dumps({"architecture": architecture, **outcome}), flush=True)
        gc.collect()
        torch._dynamo.reset()


if __name__ == "__main__":
    main()
