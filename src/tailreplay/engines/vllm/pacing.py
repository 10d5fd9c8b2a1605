"""How many tokens to replay between two forwards while other requests' answers are being decoded."""

from __future__ import annotations

FIRST = 32
LEAST = 8
_WEIGHT = 0.3


class Pacer:
    """Learns from the time between steps how much of a replay fits beside decoding. No clock of its own.

    A step that only decodes takes `quiet` seconds; one that replays n tokens as well takes longer by their cost. The next
    budget is what should make a step longer by `share` of the quiet time.

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
        return max(min(LEAST, self._most), min(self._most, int(self._share * self._quiet / self._token)))

    def observe(self, seconds: float, replayed: int) -> None:
        """Take note of a step that only decoded, and replayed so many tokens."""
        if not replayed:
            self._quiet = seconds if self._quiet is None else self._quiet + _WEIGHT * (seconds - self._quiet)
        elif self._quiet is not None:
            # What does not depend on the tokens (copying keys and values, starting kernels) counts with them: the budget
            # settles where all of it together fits.
            cost = max(seconds - self._quiet, 0.01 * self._quiet) / replayed
            self._token = cost if self._token is None else (self._token + cost) / 2
