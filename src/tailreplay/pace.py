"""How fast a machine has been, so that a plan's cost in operations and bytes becomes a time that can be checked."""

from __future__ import annotations

from dataclasses import dataclass

from tailreplay.plan import Estimate

_WEIGHT = 0.3
"""Of the newest observation."""
_LEAST_SECONDS = 1e-4
"""A phase that took less says nothing about speed."""


@dataclass
class Pace:
    """Rates seen so far: moving means, 0 before the first observation.

    Attributes
    ----------
    bytes : float
        A second, of keys, values and hiddens.
    replay_flops, prefill_flops : float
        Floating-point operations a second.
    """

    bytes: float = 0.0
    replay_flops: float = 0.0
    prefill_flops: float = 0.0

    def observe(self, estimate: Estimate, copy: float, replay: float, prefill: float) -> None:
        """Learn from a request whose phases took these seconds. Mutates self."""
        self.bytes = _mixed(self.bytes, estimate.bytes, copy)
        self.replay_flops = _mixed(self.replay_flops, estimate.replay_flops, replay)
        self.prefill_flops = _mixed(self.prefill_flops, estimate.hit_flops - estimate.replay_flops, prefill)

    def predict(self, estimate: Estimate) -> float | None:
        """Return the seconds that a request will take up to its first token; None before all it needs was seen."""
        total = 0.0
        for work, rate in (
            (estimate.bytes, self.bytes),
            (estimate.replay_flops, self.replay_flops),
            (estimate.hit_flops - estimate.replay_flops, self.prefill_flops),
        ):
            if work and not rate:
                return None
            total += work / rate if work else 0.0
        return total


def _mixed(rate: float, work: float, seconds: float) -> float:
    if not work or seconds < _LEAST_SECONDS:
        return rate
    seen = work / seconds
    return seen if not rate else (1 - _WEIGHT) * rate + _WEIGHT * seen
