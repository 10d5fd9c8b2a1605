"""A device that records graphs on CPU: every tensor operation is kept, and done again on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NEEDS_HOST = ("_local_scalar_dense", "nonzero", "masked_select", "item", "_unique2")


class FakeGraph(TorchDispatchMode):
    """Operations with their arguments and results, as a CUDA graph holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in _NEEDS_HOST:
            raise RuntimeError(f"{func} needs the host, which a graph cannot wait for")
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        """Do the operations again; what they make is written where it was the first time."""
        self.replays += 1
        for func, args, kwargs, result in self.operations:
            for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class FakeDevice:
    """Records on CPU. A real graph does not compute while it is recorded: what it leaves in memory is spoiled here."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.graphs: list[FakeGraph] = []
        self.warm_ups = self.waits = 0
        self.stream = 0

    def queue(self) -> int:
        return self.stream

    def warm_up(self, work: Callable[[], object]) -> None:
        self.warm_ups += 1
        work()

    def record(self, work: Callable[[], object]) -> FakeGraph:
        if self.error is not None:
            raise self.error
        graph = FakeGraph()
        with graph:
            work()
        inputs = {id(leaf) for _, args, kwargs, _ in graph.operations for leaf in tree_leaves((args, kwargs))}
        for _, _, _, result in graph.operations:
            for made in tree_leaves(result):
                if isinstance(made, torch.Tensor) and id(made) not in inputs and made.is_floating_point():
                    made.fill_(torch.nan)
        self.graphs.append(graph)
        return graph

    def synchronize(self) -> None:
        self.waits += 1
