"""Two pipeline stages whose border cuts a group of linear layers, so that the later stage stores its own input."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm_live.run_models import MATCHED, SAVED, measure
from tests.vllm_slow.test_ranks import WAYS


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("architecture", "border"), [("Qwen3NextForCausalLM", "5,3"), ("NemotronHForCausalLM", "5,7")])
def test_an_exact_hit_has_the_states_of_a_cold_run(
    architecture: str, border: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", border)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    arguments, _ = WAYS["pipeline"]
    outcome = measure(architecture, tmp_path, arguments)
    assert outcome["report"]["matched"] == outcome["report"]["replayed"] == MATCHED
    assert outcome["resumed_report"]["anchor"] == SAVED
    for kind in ("hit", "resumed"):
        assert outcome[kind] < max(2 * outcome["floor"], 0.02)
    assert outcome["zero"] > 0.5
