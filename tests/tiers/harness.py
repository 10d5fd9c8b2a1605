"""What `contract.py` asks of a tier's test harness."""

from __future__ import annotations

from collections.abc import Callable

from tailreplay.tiers.base import Tier


class Harness:
    """A tier and what can be done to its medium.

    Attributes
    ----------
    faults : tuple of str
        What `break_` understands: "error", "delay", "full", "readonly", "gone".
    persists : bool
        Whether pages are there after closing and opening again.
    """

    faults: tuple[str, ...] = ()
    persists = False

    def open(self) -> Tier:
        """Open the tier, or open it again on what it left."""
        raise NotImplementedError

    def break_(self, fault: str) -> None:
        """Let operations of the open tier fail, or take long, until `mend`."""
        raise NotImplementedError

    def mend(self) -> None:
        """End the fault; without one it does nothing."""

    def corrupt(self, key: bytes, part: str, change: Callable[[bytes], bytes]) -> bool:
        """Change what is stored of a page behind the tier's back; False if it is not there. `part` may be "header"."""
        raise NotImplementedError

    def destroy(self) -> None:
        """Clean up after the tier was closed."""
