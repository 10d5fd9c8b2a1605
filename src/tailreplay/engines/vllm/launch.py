"""Start vLLM's own OpenAI server with the connector configured."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SITE = Path(__file__).parent / "site"
CONNECTOR_MODULE = "tailreplay.engines.vllm.connector"
_FEW_CORES = 4


def transfer_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of vLLM's ``kv_transfer_config`` for connector settings (see `settings.Settings`)."""
    return {
        "kv_connector": "TailReplayConnector",
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": dict(settings),
    }


def server_command(
    model: str, name: str, host: str, port: int, settings: Mapping[str, Any], extra: Sequence[str], cpu: bool
) -> list[str]:
    """Return the command line of the server.

    Parameters
    ----------
    extra : sequence of str
        Go to vLLM as they are and win over what is set here.
    cpu : bool
        Whether vLLM runs on CPU, where its Gated DeltaNet kernels want bfloat16.
    """
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--served-model-name", name, "--host", host, "--port", str(port)]
    # vLLM's own prefix cache would take memory and add little.
    command += ["--no-enable-prefix-caching", "--enable-prompt-tokens-details"]
    command += ["--middleware", "tailreplay.engines.vllm.middleware.ReuseParams"]
    command += ["--kv-transfer-config", json.dumps(transfer_config(settings))]
    if cpu and not any(argument.startswith("--dtype") for argument in extra):
        command += ["--dtype", "bfloat16"]
    return [*command, *extra]


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return `base` with what vLLM's processes need here."""
    env = dict(base)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SITE), env.get("PYTHONPATH", "")]))
    env.setdefault("VLLM_HOST_IP", "127.0.0.1")
    env.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    if _cores() <= _FEW_CORES:
        # The CPU build reserves a core for each engine's scheduler, which spins, and one more where there is any connector.
        # Where that leaves none it reserves none, and the scheduler spins on a core that computes: half the speed.
        env.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "1")
    # vLLM logs no other package's lines unless told to.
    env.setdefault("VLLM_NO_USAGE_STATS", "1")
    return env


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
