"""A vLLM engine in this process, to look inside, and a vLLM server, to talk to."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tailreplay import torchvision_shim
from tailreplay.engines.vllm.launch import environment, server_command, transfer_config

torchvision_shim.install()
os.environ.update(environment(os.environ))
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
# To look into workers that are processes of their own.
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"

BUNDLED = Path(__file__).parents[2] / "src" / "tailreplay" / "bundled"
READY_SECONDS = 240
REPLAY = "replay"


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with slow-decaying states, so that forgetting cannot hide an error."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("slow")
    for path in BUNDLED.iterdir():
        shutil.copyfile(path, folder / path.name)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, tensor in weights.items():
        if name.endswith("A_log"):
            weights[name] = torch.empty_like(tensor).uniform_(0.001, 0.05, generator=generator).log_()
        elif name.endswith("dt_bias"):
            weights[name] = torch.zeros_like(tensor)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def error(a: Finished, b: Finished) -> float:
    """||a - b|| / ||b|| over all states of one kind, the worse of convolution and recurrence."""
    worst = 0.0
    for kind in range(2):
        wrong = sum(
            float((a.states[name][kind].double() - b.states[name][kind].double()).norm() ** 2) for name in a.states
        )
        worst = max(worst, (wrong / sum(float(s[kind].double().norm() ** 2) for s in b.states.values())) ** 0.5)
    return worst


def _read_states(_: Any, blocks: dict[int, int]) -> dict[str, list[Any]]:
    """Runs in a worker's process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker.states.read(blocks)


@dataclass
class Finished:
    """What one request left."""

    tokens: list[int]
    cached: int
    report: dict[str, Any]
    states: dict[str, list[Any]]


class Engine:
    """vLLM in this process, one request at a time, with the states of each at its end."""

    def __init__(self, model: Path, engine: dict[str, Any] | None = None, **settings: Any) -> None:
        from vllm import LLM
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        arguments = {
            "dtype": "bfloat16",
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "max_model_len": 8192,
            "max_num_batched_tokens": 2048,
        }
        self.llm = LLM(str(model), **{**arguments, **(engine or {})}, kv_transfer_config=transfer_config(settings))
        self.worker = get_kv_transfer_group()._worker if has_kv_transfer_group() else None
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.deciding = self.scheduler.connector._scheduler
        self.geometry = self.scheduler.connector._geometry
        self.block = self.geometry.block_size

    def run(self, ids: list[int], *, chunk: int = 0, max_tokens: int = 1, **options: Any) -> Finished:
        """Compute `ids`; `chunk` limits how many tokens a step computes of them."""
        from vllm import SamplingParams

        seen: dict[str, Any] = {}
        connector = self.scheduler.connector
        original = connector.request_finished_all_groups

        def finished(request: Any, blocks: Any) -> Any:
            seen["states"] = self.read_states(self.geometry.state_blocks(blocks, request.num_computed_tokens))
            return original(request, blocks)

        # Not long_prefill_token_threshold: it has no effect on a request that is alone.
        whole = self.scheduler.max_num_scheduled_tokens
        self.scheduler.max_num_scheduled_tokens = chunk or whole
        connector.request_finished_all_groups = finished
        try:
            params = SamplingParams(
                max_tokens=max_tokens,
                temperature=0,
                ignore_eos=True,
                extra_args={"kv_transfer_params": {"tailreplay": options}},
            )
            (out,) = self.llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        finally:
            connector.request_finished_all_groups = original
            self.scheduler.max_num_scheduled_tokens = whole
        report = (out.kv_transfer_params or {}).get("tailreplay", {})
        return Finished(list(out.outputs[0].token_ids), out.num_cached_tokens, report, seen["states"])

    def read_states(self, blocks: dict[int, int]) -> dict[str, list[Any]]:
        """Return the states in these blocks by layer, and by rank if the workers are processes of their own."""
        if self.worker is not None:
            return self.worker.states.read(blocks)
        ranks = self.llm.collective_rpc(_read_states, args=(blocks,))
        return {f"{rank}:{name}": states for rank, found in enumerate(ranks) for name, states in found.items()}

    def close(self) -> None:
        """Let go of everything, so that another engine can start in this process."""
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        del self.llm, self.worker, self.scheduler, self.deciding
        cleanup_dist_env_and_memory()


@pytest.fixture(scope="module")
def engine(slow_model: Path) -> Iterator[Engine]:
    """The slow-decaying model, matches of any length."""
    running = Engine(slow_model, host_bytes="64MiB", min_match=1)
    yield running
    running.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """A vLLM server with the connector, on the bundled model."""

    def __init__(self, log: Path, settings: dict[str, Any], *extra: str, repair: bool = False) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self.log = log
        port = int(self.url.rsplit(":", 1)[1])
        arguments = ["--enforce-eager", "--max-model-len", "8192", *extra]
        command = server_command(str(BUNDLED), "bundled", "127.0.0.1", port, settings, arguments, cpu=True)
        base = {key: value for key, value in os.environ.items() if key != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        env = environment({**base, "VLLM_LOGGING_LEVEL": "INFO", "VLLM_CPU_KVCACHE_SPACE": "1"})
        # Tests look at what stands behind approximate hits: it must not change by itself.
        env["TAILREPLAY_REPAIR"] = str(int(repair))
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True, cwd=log.parent
            )
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2).close()
                return
            except OSError:
                time.sleep(0.2)
        pytest.fail(f"the vLLM server did not start:\n{self.log.read_text()[-4000:]}")

    def metrics(self) -> dict[str, float]:
        """Return our series, by name and labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            lines = [line for line in answer.read().decode().splitlines() if line.startswith("vllm:tailreplay_")]
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}

    def close(self) -> None:
        """End the server and its processes."""
        os.killpg(self.process.pid, 15)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, 9)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the bundled model that tells routers what it holds."""
    folder = tmp_path_factory.mktemp("server")
    events = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{folder}/events",
        "replay_endpoint": f"ipc://{folder}/{REPLAY}",
    }
    settings = {"host_bytes": "256MiB", "min_match": 16}
    running = Server(folder / "log", settings, "--kv-events-config", json.dumps(events))
    yield running
    running.close()
