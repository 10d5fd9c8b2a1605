"""How fast the machine copies memory: no load of cached pages can be faster."""

from __future__ import annotations

import time

import torch

_BYTES = 256 << 20
"""Far more than caches hold."""


def copy_bandwidth(device: torch.device, nbytes: int = _BYTES, repeats: int = 4) -> float:
    """Return the bytes a second of a plain copy from (page-locked, for CUDA) host memory to `device`, best of `repeats`."""
    cuda = device.type == "cuda"
    # Not zeros: those would all be read from one page of memory.
    source = torch.ones(nbytes, dtype=torch.uint8, pin_memory=cuda)
    target = torch.ones(nbytes, dtype=torch.uint8, device=device)
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        target.copy_(source)
        if cuda:
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return nbytes / best
