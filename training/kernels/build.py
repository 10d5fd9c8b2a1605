"""Builds the C++ kernels, once for each source and set of flags."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import sys
import warnings
from pathlib import Path
from types import ModuleType

SOURCE = Path(__file__).with_name("kernels.cpp")
HEADERS = ("simd.h", "delta.h", "layers.h")
FLAGS = ("-O3", "-march=native", "-ffast-math", "-mprefer-vector-width=512", "-std=c++20")


def missing_tools() -> str | None:
    """Return one sentence that says what the build lacks, or None."""
    # A virtual environment's own ninja counts, whether or not the environment is activated.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    names = {"g++": "g++", "ninja": "ninja-build"}
    lacking = [tool for tool in names if shutil.which(tool) is None]
    if not lacking:
        return None
    packages = " ".join(names[tool] for tool in lacking)
    return f"Training compiles its kernels and needs {' and '.join(lacking)}: apt-get install {packages}."


@functools.cache
def kernels() -> ModuleType:
    """Return the compiled extension; the first call on a machine takes about a minute.

    Raises
    ------
    SystemExit
        With one sentence, if the compiler or ninja is missing.
    """
    lacking = missing_tools()
    if lacking:
        raise SystemExit(lacking)
    import torch
    from torch.utils.cpp_extension import load

    # A build is good for one source, one torch and one kind of processor.
    made_for = (FLAGS, torch.__version__, torch.backends.cpu.get_cpu_capability(), platform.machine())
    source = b"".join(path.read_bytes() for path in (SOURCE, *(SOURCE.with_name(name) for name in HEADERS)))
    digest = hashlib.sha256(source + repr(made_for).encode()).hexdigest()[:12]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "tailreplay-train" / f"kernels-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module: ModuleType = load(
            name=f"tailreplay_train_{digest}",
            sources=[str(SOURCE)],
            extra_cflags=list(FLAGS),
            extra_ldflags=["-lmvec", "-lm"],
            build_directory=str(folder),
        )
    return module
