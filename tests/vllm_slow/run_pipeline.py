"""Run an architecture on two pipeline stages and print the first token's log probabilities, by mode of reuse, as JSON."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tailreplay.engines.vllm.launch import transfer_config
from tests.vllm_live import tiny_models
from tests.vllm_live.run_models import IDS, MATCHED


def main(architecture: str) -> None:
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        tiny_models.save(architecture, Path(folder))
        # Not in eager mode: vLLM's CPU workers then have no buffer for what another stage sends.
        llm = LLM(
            folder,
            dtype="bfloat16",
            enable_prefix_caching=False,
            max_model_len=2048,
            max_num_batched_tokens=2048,
            pipeline_parallel_size=2,
            kv_transfer_config=transfer_config({"host_bytes": "64MiB", "min_match": 1}),
        )

    def run(ids: list[int], **options: Any) -> tuple[int, dict[int, float]]:
        parameters = SamplingParams(
            max_tokens=1, temperature=0, logprobs=20, extra_args={"kv_transfer_params": {"tailreplay": options}}
        )
        (out,) = llm.generate([{"prompt_token_ids": ids}], parameters, use_tqdm=False)
        report = (out.kv_transfer_params or {}).get("tailreplay", {})
        return report["matched"], {token: found.logprob for token, found in out.outputs[0].logprobs[0].items()}

    run(IDS, mode="off")
    for _ in range(2):
        run([5, 6, 7], mode="off", store=False)  # steps in which the last page lands
    found = {mode: run([*IDS[:MATCHED], 5], mode=mode, store=False) for mode in ("off", "exact", "zero")}
    print(json.dumps({mode: {"matched": matched, "top": top} for mode, (matched, top) in found.items()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
