"""CUDA graphs, as torch's documentation of ``torch.cuda.graph`` has them made. Never run on a GPU yet."""

from __future__ import annotations

import torch

from tailreplay.engines.transformers.graphs.base import Work

_WARM_UPS = 3


class CudaGraphs:
    """Records on one CUDA device. Each graph has a memory pool of its own.

    Parameters
    ----------
    device : torch.device
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def queue(self) -> int:
        """Name the current stream."""
        stream: int = torch.cuda.current_stream(self._device).cuda_stream
        return stream

    def warm_up(self, work: Work) -> None:
        """Do `work` a few times on a side stream: libraries choose and load their kernels then."""
        current, side = torch.cuda.current_stream(self._device), torch.cuda.Stream(self._device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                work()
        current.wait_stream(side)

    def record(self, work: Work) -> torch.cuda.CUDAGraph:
        """Record `work`."""
        graph = torch.cuda.CUDAGraph()
        # What other threads do meanwhile, such as allocating page-locked memory, is none of the recording's business.
        with torch.cuda.device(self._device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
        return graph

    def synchronize(self) -> None:
        """Wait for the current stream."""
        torch.cuda.current_stream(self._device).synchronize()
