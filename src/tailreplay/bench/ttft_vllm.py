"""Time to first token in vLLM: hits against cold prefills, in one engine."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row a length and ratio, as `tailreplay.bench.ttft` prints them.

    The engine runs in this process. A cold run and hits take turns, after a warm-up; `replay_ms` and `copy_ms` are the
    connector's own clocks.
    """
    from tailreplay import torchvision_shim
    from tailreplay.engines.vllm.launch import environment

    torchvision_shim.install()
    for name, value in environment({}).items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or _shape(arguments, Path(folder))
        engine = _Engine(model, arguments)
        return [engine.row(length, ratio) for length in arguments.lengths for ratio in arguments.ratios]


def _shape(arguments: argparse.Namespace, folder: Path) -> str:
    import torch

    from tailreplay.bench.shapes import random_model

    random_model(arguments.shape, getattr(torch, arguments.dtype)).save_pretrained(folder)
    return str(folder)


class _Engine:
    def __init__(self, model: str, arguments: argparse.Namespace) -> None:
        from vllm import LLM

        from tailreplay.engines.vllm.launch import transfer_config

        self._arguments = arguments
        self._llm = LLM(
            model,
            dtype=arguments.dtype,
            enforce_eager=True,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            max_model_len=max(arguments.lengths) + arguments.query + 256,
            max_num_batched_tokens=2048,
            kv_transfer_config=transfer_config({"host_bytes": arguments.host_bytes, "min_match": 1}),
        )
        from tailreplay.engines.transformers.describe import describe

        self._costs = describe(model).costs

    def row(self, length: int, ratio: float) -> dict[str, Any]:
        """Store a prefix, then time cold runs and hits in turn."""
        import torch

        arguments = self._arguments
        generator = torch.Generator().manual_seed(length)
        ids = torch.randint(3, 4000, (length + arguments.query,), generator=generator).tolist()
        self._run(ids[:length], {"mode": "off"})
        self._run([5, 6, 7], {"mode": "off", "store": False})  # a step in which the last page lands
        cold, hits, matched = [], [], 0
        for turn in range(arguments.warmup + arguments.repeats):
            full, _ = self._run(ids, {"mode": "off", "store": False})
            hit, report = self._run(ids, {"mode": "replay", "ratio": ratio, "store": False})
            matched = report["matched"]
            if turn >= arguments.warmup:
                cold.append(full)
                hits.append(hit)
        if matched != length:
            raise RuntimeError(f"expected a hit of {length} tokens, got {matched}")
        tails = [report["replayed"]] * len(self._costs.topology.groups)
        limit = self._costs.prefill_flops(0, len(ids)) / self._costs.hit_flops(matched, len(ids), tails)
        return {
            "engine": "vllm",
            "length": length,
            "ratio": ratio,
            "matched": matched,
            "replayed": report["replayed"],
            "full_ms": round(1000 * median(cold), 3),
            "hit_ms": round(1000 * median(hits), 3),
            "speedup": median(cold) / median(hits),
            "limit": limit,
            "loaded_mib": self._costs.hit_bytes(matched, tails) / 2**20,
        }

    def _run(self, ids: list[int], options: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=1, temperature=0, detokenize=False, extra_args={"kv_transfer_params": {"tailreplay": options}}
        )
        begin = time.perf_counter()
        (out,) = self._llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        return seconds, (out.kv_transfer_params or {}).get("tailreplay", {})
