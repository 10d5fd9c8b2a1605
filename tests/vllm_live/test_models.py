"""Each architecture in vLLM itself: states after a hit that replays all against those of a cold run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tailreplay.engines.vllm.adapters import ARCHITECTURES
from tailreplay.engines.vllm.launch import environment
from tests.vllm_live.run_models import MATCHED, SAVED

# Those that vLLM's CPU build cannot run, and what it says.
ELSEWHERE = {
    "OlmoHybridForCausalLM": "module 'triton' has no attribute 'set_allocator'",
    "KimiLinearForCausalLM": "",  # its model file wants CUDA streams; it may fail before that
}
HERE = [name for name in ARCHITECTURES if name not in ELSEWHERE]
# The first test waits for all of them: about 80 s on two idle cores.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What `run_models` says of each architecture. One process for all: importing vLLM takes longer than running one."""
    log = tmp_path_factory.mktemp("models") / "log"
    env = environment(os.environ)
    with log.open("w") as errors:
        done = subprocess.run(
            [sys.executable, "-m", "tests.vllm_live.run_models", *HERE, *ELSEWHERE],
            stdout=subprocess.PIPE, stderr=errors, text=True, env=env, cwd=Path(__file__).parents[2], timeout=560,
        )  # fmt: skip
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    missing = {"failed": f"the process ended with {done.returncode}: {log.read_text()[-2000:]}"}
    return {name: next((one for one in found if one["architecture"] == name), missing) for name in ARCHITECTURES}


@pytest.mark.parametrize("architecture", HERE)
def test_an_exact_hit_has_the_states_of_a_cold_run(architecture: str, outcomes: dict[str, dict[str, Any]]) -> None:
    outcome = outcomes[architecture]
    assert "failed" not in outcome, outcome["failed"]
    assert outcome["report"]["matched"] == outcome["report"]["replayed"] == MATCHED
    assert outcome["report"]["exact"]
    assert outcome["states"] >= 5
    assert outcome["resumed_report"]["exact"]
    assert (outcome["resumed_report"]["anchor"], outcome["resumed_report"]["replayed"]) == (SAVED, MATCHED - SAVED)
    for kind in ("hit", "resumed"):
        assert outcome[kind] < max(2 * outcome["floor"], 0.02)
    # Nor would no replay at all have passed.
    assert outcome["zero"] > 0.5


@pytest.mark.parametrize("architecture", ELSEWHERE)
def test_what_cannot_run_here_still_cannot(architecture: str, outcomes: dict[str, dict[str, Any]]) -> None:
    assert ELSEWHERE[architecture] in outcomes[architecture].get("failed", "nothing: it runs, so test it above")
