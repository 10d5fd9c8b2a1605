"""Where in the curriculum a run is, and how long it will be on a machine of this speed."""

from __future__ import annotations

from dataclasses import dataclass

from training.settings import Settings, Stage


@dataclass
class Plan:
    """Total length of a run, which follows the machine's speed if time may run short.

    Attributes
    ----------
    settings : Settings
    total : int
        Tokens of all ranks together; shares of it decide the curriculum and the learning rate.
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
        """Set the total to what the time that is left allows, at most the settings'; returns whether it changed.

        Once the learning rate falls, the total only shrinks: the fall is not taken back.

        Parameters
        ----------
        tokens : int
            Done so far.
        seconds : float
            Spent so far, in all parts of the run.
        speed : float
            Tokens a second, of the last minutes.
        """
        left = max(0.0, self.settings.run.minutes * 60 - seconds)
        reachable = min(self.settings.run.tokens, tokens + int(left * speed))
        falling = tokens > (1 - self.settings.optimiser.decay_share) * self.total
        # Small differences are left alone: the speed is no exact number. At the end they count.
        if abs(reachable - self.total) < 0.03 * (self.total - tokens) or (falling and reachable > self.total):
            return False
        self.total = reachable
        return True

    def _end(self, stage: Stage) -> float:
        return stage.until * (1e6 if stage.until > 1 else self.total)
