"""A lossy codec below host memory, and damage there, inside a vLLM engine."""

from __future__ import annotations

from pathlib import Path

from tests.vllm_live.conftest import Engine, error
from tests.vllm_live.test_tiers import BASE, settings_of, settle


def test_a_lossy_codec_is_said_so_and_exact_mode_stays_away(slow_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    engine = Engine(slow_model, **settings_of(folder))
    prompt = [*BASE[:2000], 4]
    engine.run(BASE, mode="off")
    settle(engine)
    lossless = engine.run(prompt, mode="replay", ratio=0.05, store=False)
    engine.deciding.catalog.clear()
    hit = engine.run(prompt, mode="replay", ratio=0.05, store=False)
    assert hit.report["matched"] == lossless.report["matched"] == 2000, (hit.report, engine.deciding.counts)
    assert not hit.report["exact"]
    assert 0 < error(hit, lossless) < 0.02
    engine.deciding.catalog.clear()
    assert engine.run(prompt, mode="exact", store=False).report["matched"] == 0
    # Damaged behind its back: computed, not served.
    engine.deciding.catalog.clear()
    settle(engine)
    for path in folder.iterdir():
        if path.name.startswith("data") or path.suffix == ".mdb":
            data = bytearray(path.read_bytes())
            for at in range(1 << 16, len(data), 997):
                data[at] ^= 1
            with path.open("r+b") as file:
                file.write(data)
    broken = engine.run(prompt, mode="replay", ratio=0.05, store=False)
    assert broken.report["matched"] == 0
    assert engine.deciding.catalog.pinned == 0
    engine.close()
