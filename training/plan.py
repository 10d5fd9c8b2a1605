"""Where in the curriculum a run is, and how long it will be on a machine of this speed."""

from __future__ import annotations

from dataclasses import dataclass

from training.settings import Settings, Stage


@dataclass
class Plan:
    """Total length of a run. It may shrink while the run goes on, if time runs short; never grow.

    Attributes
    ----------
    settings : Settings
    total : int
        Tokens of all ranks together.
    """

    settings: Settings
    total: int

    def stage(self, tokens: int) -> tuple[int, Stage]:
        """Index and settings of the stage after `tokens`."""
        for index, stage in enumerate(self.settings.stages):
            if tokens < self._end(stage):
                return index, stage
        return len(self.settings.stages) - 1, self.settings.stages[-1]

    def rate(self, tokens: int, step: int) -> float:
        """Learning rate, as a share of the full one: a short rise, constant, and a linear fall at the end."""
        options = self.settings.optimiser
        rise = (step + 1) / options.warmup_steps
        fall = (self.total - tokens) / (options.decay_share * self.total)
        return max(0.01, min(1.0, rise, fall))

    def fit(self, tokens: int, seconds: float, speed: float) -> bool:
        """Shrink the run to what the time that is left allows; returns whether it did.

        Parameters
        ----------
        tokens : int
            Done so far.
        seconds : float
            Spent so far, in all parts of the run.
        speed : float
            Tokens a second of late; the stages to come, with longer sequences, are a little slower.
        """
        left = max(0.0, self.settings.run.minutes * 60 - seconds)
        reachable = tokens + int(left * speed)
        # A little less is left alone: the speed is no exact number.
        if reachable >= 0.97 * self.total:
            return False
        self.total = reachable
        return True

    def _end(self, stage: Stage) -> float:
        return stage.until * (1e6 if stage.until > 1 else self.total)
