"""How many tokens to replay between two forwards while other requests' answers are being decoded."""

from __future__ import annotations

FIRST = 16
LEAST = 8
_WEIGHT = 0.3


class Pacer:
    """Learns from the time between steps how much of a replay fits beside decoding. No clock of its own.

    A step that only decodes takes `quiet` seconds; one that replays n tokens as well takes ``fixed + n * token`` longer.
    The next budget is what should make a step longer by `share` of the quiet time, but not fewer tokens than cost as much
    as the fixed part: below that, a replay would take ever more steps and hold decoding up longer in all.

    Parameters
    ----------
    share : float
        How much longer a step may get, as a share of its time without replay; 0 for no limit but `most`.
    most : int
        Never more tokens than these.
    """

    def __init__(self, share: float, most: int) -> None:
        self._share = share
        self._most = most
        self._quiet: float | None = None
        self._token: float | None = None
        self._fixed = 0.0
        self._sloped = False
        self._step: float | None = None
        self._last: tuple[int, float] | None = None

    def budget(self, decoding: bool) -> int:
        """Return how many tokens to replay in the next step.

        Parameters
        ----------
        decoding : bool
            Whether that step decodes for others too.
        """
        if not decoding or not self._share:
            return self._most
        if self._quiet is None or self._token is None:
            return min(FIRST, self._most)
        assert self._last is not None
        last = self._last[0]
        tokens = int((self._share * self._quiet - self._fixed) / self._token)
        if not self._sloped and not _differs(tokens, last):
            tokens = last // 2  # another number, to learn from
        # Never far above what was tried: times are noisy.
        return min(self._most, 2 * last, max(LEAST, tokens, int(self._fixed / self._token)))

    def step(self, now: float, decoding: bool, replayed: int) -> None:
        """Take note of the end of a step, at a monotonic time. Of two steps that only decoded, the second is timed."""
        if decoding and self._step is not None:
            self.observe(now - self._step, replayed)
        self._step = now if decoding else None

    def observe(self, seconds: float, replayed: int) -> None:
        """Take note of a step that only decoded, and replayed so many tokens."""
        if not replayed:
            self._quiet = seconds if self._quiet is None else self._quiet + _WEIGHT * (seconds - self._quiet)
        elif self._quiet is not None:
            self._learn(replayed, max(seconds - self._quiet, 0.01 * self._quiet))

    def _learn(self, tokens: int, extra: float) -> None:
        if self._last is None or self._token is None:
            self._token = extra / tokens
        elif _differs(tokens, self._last[0]):
            # Two different numbers of tokens tell the price of one from what any replay costs.
            slope = (extra - self._last[1]) / (tokens - self._last[0])
            slope = min(max(slope, 0.02 * extra / tokens), extra / tokens)
            self._token = slope if not self._sloped else (self._token + slope) / 2
            self._sloped = True
        else:
            # About as many as before: if it took another time, the price of a token has changed.
            self._token = max(self._token + ((extra - self._fixed) / tokens - self._token) / 2, 0.02 * extra / tokens)
        self._fixed = max(extra - tokens * self._token, 0.0)
        self._last = tokens, extra


def _differs(tokens: int, last: int) -> bool:
    """Whether two numbers of tokens are far enough apart to tell a slope."""
    return abs(tokens - last) * 5 >= max(tokens, 1)
