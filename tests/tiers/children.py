"""Other processes that use a tier, and go on step by step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMPORTS = (
    "import sys\nfrom tailreplay.tiers.base import TierError\nfrom tailreplay.tiers.mooncake import MooncakeTier\n"
)


def run_child(script: str, target: str) -> str:
    command = [sys.executable, "-c", f"{IMPORTS}target = sys.argv[1]\n{script}", target]
    ended = subprocess.run(command, timeout=60, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def start_child(script: str, target: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", f"{IMPORTS}target = sys.argv[1]\n{script}", target]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=ROOT, env=environment(), text=True)


def until(child: subprocess.Popen[str], mark: str) -> list[str]:
    """Return the lines before `mark`; pytest's time limit ends a child that hangs."""
    assert child.stdout is not None
    lines = []
    for line in child.stdout:
        if line.strip() == mark:
            return lines
        lines.append(line.strip())
    raise AssertionError(f"it ended with {child.wait(30)} after {lines}")


def go_on(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
