"""Copies beside compute: a CUDA stream where there is one, the same calls without streams on CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tailreplay.clock import Clock


class CopyStream:
    """A side stream for host-to-device copies.

    Parameters
    ----------
    device : torch.device
        Where the copies go. On anything but CUDA the copies run in line and the other calls do nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._done = torch.cuda.Event() if self._stream is not None else None

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Run the block's copies on the side stream, after what the current stream has queued so far."""
        if self._stream is None or self._done is None:
            yield
            return
        # The device is named throughout: the current stream is that of the current device, which may be another.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._done.record()

    def mark(self, clock: Clock) -> Any:
        """Mark the moment at which the copies ordered so far have ended."""
        if self._stream is None:
            return clock.mark()
        with torch.cuda.stream(self._stream):
            return clock.mark()

    def wait(self) -> None:
        """Make the current stream wait for the copies: one event, no host synchronisation."""
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)

    def synchronize(self) -> None:
        """Block the host until every copy so far has ended, so that its source and target may be let go."""
        if self._done is not None:
            self._done.synchronize()
            torch.cuda.current_stream(self._device).synchronize()
