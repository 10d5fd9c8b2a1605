"""Repair in a vLLM server: what was answered approximately is exact a moment later, with nobody asking for it."""

from __future__ import annotations

import time
from pathlib import Path

import openai
import pytest
from transformers import AutoTokenizer

from tests.server.texts import ids_of
from tests.vllm_live.conftest import BUNDLED, Server
from tests.vllm_live.test_server import Caller


@pytest.mark.parametrize("streamed", [False, True])
def test_an_approximate_prompt_becomes_exact_while_nobody_asks(tmp_path: Path, streamed: bool) -> None:
    server = Server(tmp_path / "log", {"host_bytes": "256MiB", "min_match": 16, "start": "zero"}, repair=True)
    try:
        caller = Caller(server, "salt")
        tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
        document, rest = ids_of(tokenizer, 1, 1400), ids_of(tokenizer, 2, 300)
        caller.send(document)
        prompt = [*document[:1211], *rest]
        if streamed:
            extra = {"cache_salt": "salt", "ignore_eos": True}
            stream = caller.client.completions.create(
                model="bundled", prompt=prompt, max_tokens=2, temperature=0, stream=True, extra_body=extra
            )
            assert sum(1 for _ in stream) >= 2
        else:
            report = caller.send(prompt, 2).report
            assert report is not None
            assert report["depth"] == 1
        deadline = time.monotonic() + 60
        while True:
            report = caller.send([*prompt, 7], 1, mode="exact", store=False).report
            assert report is not None
            if report["matched"] == len(prompt):
                break
            assert time.monotonic() < deadline, "it was not computed again"
            time.sleep(0.5)
        assert report["exact"]
        assert (
            server.metrics()['vllm:tailreplay_misses_total{engine="0",model_name="bundled",reason="unseen_prefix"}']
            == 1
        )
    finally:
        server.close()


def test_a_server_makes_its_mean_state_while_nobody_asks(tmp_path: Path) -> None:
    server = Server(tmp_path / "log", {"host_bytes": "256MiB", "min_match": 16}, "--max-model-len", "2048", repair=True)
    labels = '{engine="0",model_name="bundled"'
    try:
        caller = Caller(server, "salt")
        document = ids_of(AutoTokenizer.from_pretrained(BUNDLED), 1, 1400)
        report = caller.send(document).report
        deadline = time.monotonic() + 60
        while server.metrics().get(f"vllm:tailreplay_calibrations_total{labels}}}", 0) < 1:
            assert time.monotonic() < deadline, "it has none"
            time.sleep(0.2)
        report = caller.send([*document[:1211], 7], store=False).report
        assert report is not None
        assert (report["start"], report["matched"]) == ("mean", 1211)
        found = server.metrics()
        assert found[f'vllm:tailreplay_mean_state{labels},tier="host"}}'] == 1
        assert found[f'vllm:tailreplay_hit_starts_total{labels},start="mean"}}'] == 1
        assert found[f"vllm:tailreplay_calibrations_total{labels}}}"] == 1, "once is enough"
        refused = caller.client.with_options(max_retries=0)
        with pytest.raises(openai.BadRequestError, match="not for clients"):
            refused.completions.create(model="bundled", prompt="x", extra_body={"tailreplay": {"calibrate": True}})
    finally:
        server.close()
