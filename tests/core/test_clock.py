"""Clocks of phases; the device's with events that are not a device's."""

from __future__ import annotations

import pytest
import torch

from tailreplay.clock import CudaClock, HostClock, clock_of


class Event:
    """An event of a device whose time is `now`; waits are counted."""

    now = 0.0
    waits = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at: float | None = None

    def record(self) -> None:
        self.at = Event.now

    def synchronize(self) -> None:
        Event.waits += 1

    def elapsed_time(self, end: Event) -> float:
        assert self.at is not None
        assert end.at is not None
        return end.at - self.at


def test_marks_of_a_device_wait_for_nothing_and_are_read_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = CudaClock()
    first = clock.mark()
    Event.now += 250.0  # milliseconds
    last = clock.mark()
    assert Event.waits == 0
    assert clock.between(first, last) == 0.25
    assert Event.waits == 2
    settled: list[bool] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: settled.append(True))
    clock.settle()
    assert settled


def test_the_host_is_timed_where_work_does_not_run_behind_it() -> None:
    clock = clock_of(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    assert clock.between(1.0, 1.5) == 0.5
    assert clock.between(clock.mark(), clock.mark()) >= 0
    assert isinstance(clock_of(torch.device("cuda")), CudaClock)
