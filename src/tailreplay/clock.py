"""Clocks of an engine's phases. A mark is a moment; what lies between two marks is read later."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Takes marks and tells the time between two of them."""

    def mark(self) -> Any:
        """Mark this moment of the work that has been ordered so far on the current stream."""

    def between(self, first: Any, last: Any) -> float:
        """Return the seconds from one mark to another. May block until the work before `last` has ended."""

    def settle(self) -> None:
        """Block until all work that was ordered has ended, so that what comes next is timed alone."""


class HostClock:
    """The host's clock: for CPU, and for serving, where nothing may wait for a device to be timed."""

    def mark(self) -> float:
        return time.perf_counter()

    def between(self, first: float, last: float) -> float:
        return last - first

    def settle(self) -> None:
        return


class CudaClock:
    """CUDA events, for benchmarks: work that a stream does later is counted where it was ordered.

    Marks wait for nothing, so host and device run ahead of each other as without the clock.
    """

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        first.synchronize()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1000

    def settle(self) -> None:
        torch.cuda.synchronize()


def clock_of(device: torch.device) -> Clock:
    """Return the clock that attributes work on `device` rightly."""
    return CudaClock() if device.type == "cuda" else HostClock()
