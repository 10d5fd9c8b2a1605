"""Two pipeline stages, with borders that cut a group of linear layers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tailreplay.engines.vllm.launch import environment
from tests.vllm_live.run_models import MATCHED

# It compiles a model on each of two ranks.
pytestmark = pytest.mark.timeout(600)


def compare(a: dict[str, Any], b: dict[str, Any]) -> tuple[int, float]:
    """Return how many tokens are among both's likeliest, and how far their log probabilities differ at most."""
    differences = [abs(a["top"][token] - b["top"][token]) for token in a["top"] if token in b["top"]]
    return len(differences), max(differences, default=float("inf"))


@pytest.mark.parametrize(("architecture", "border"), [("Qwen3NextForCausalLM", "5,3"), ("NemotronHForCausalLM", "5,7")])
def test_an_exact_hit_continues_as_a_cold_run(architecture: str, border: str, tmp_path: Path) -> None:
    env = environment(os.environ) | {"VLLM_PP_LAYER_PARTITION": border, "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    env.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    with (tmp_path / "log").open("w") as errors:
        done = subprocess.run(
            [sys.executable, "-m", "tests.vllm_slow.run_pipeline", architecture],
            stdout=subprocess.PIPE, stderr=errors, text=True, env=env, cwd=Path(__file__).parents[2], timeout=580,
        )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, (tmp_path / "log").read_text()[-3000:]
    found = json.loads(lines[0])
    assert found["exact"]["matched"] == found["zero"]["matched"] == MATCHED
    shared, difference = compare(found["exact"], found["off"])
    assert difference < 0.1
    # States that are wrong make other tokens likely.
    assert shared > 15 > 10 > compare(found["zero"], found["off"])[0]
