"""Policies by the names that people write, and the one that weighs what a page saves against how long ago it was used."""

from __future__ import annotations

from collections.abc import Callable

from tailreplay.costs import CostModel
from tailreplay.errors import CacheConfigError
from tailreplay.eviction import LeastRecentlyUsed, Policy
from tailreplay.page import Page

# Of a 4B hybrid model: a token's operations without attention to those of one (query, key) pair.
PER_TOKEN, PER_PAIR = 7.2e9, 1.3e5
ALPHA = 1.0


class FlopAware:
    """Recency plus what a page's recomputation costs by byte, after Marconi (arXiv 2411.19379).

    ``rank = last_used + alpha * pages * efficiency``. The efficiency is the operations that the page saves over those of a
    full page at the start of a sequence: above 1 far into a sequence, where each token attends to more, and below 1 for
    a page that holds few tokens, since it takes a whole slot all the same. A sum of the two, not a product or
    GreedyDual's inflating clock: between two uses it stays as it is, and no rank depends on what else was evicted.

    Parameters
    ----------
    per_token : float
        Operations of a token, without attention scores and values.
    per_pair : float
        Operations of a (query, key) pair.
    alpha : float
        For how many turnovers of the whole cache a page stays longer for an efficiency of 1 more. A turnover is a tick a
        page; ticks pass with every page stored and every hit.

    Raises
    ------
    CacheConfigError
        If alpha is negative, or a token costs nothing.
    """

    name = "flops"

    def __init__(self, per_token: float = PER_TOKEN, per_pair: float = PER_PAIR, alpha: float = ALPHA) -> None:
        if not (per_token > 0 and per_pair >= 0 and alpha >= 0):
            raise CacheConfigError("The policy 'flops' needs positive costs of a token, and alpha of at least 0.")
        self._per_token, self._per_pair, self._alpha = per_token, per_pair, alpha
        self._weight = 0.0

    @classmethod
    def of(cls, costs: CostModel, alpha: float = ALPHA) -> FlopAware:
        """Return the policy for a model of these costs."""
        return cls(
            sum(layer.mixer + layer.ffn for layer in costs.layers), sum(layer.per_pair for layer in costs.layers), alpha
        )

    def sized(self, pages: int, page_size: int) -> None:
        self._weight = self._alpha * pages / self._flops(0, page_size)

    def rank(self, page: Page) -> float:
        return page.last_used + self._weight * self._flops(page.start, page.tokens)

    def _flops(self, start: int, tokens: int) -> float:
        return tokens * (self._per_token + self._per_pair * (start + (tokens + 1) / 2))


def policy_of(name: str, costs: CostModel | None = None) -> Policy:
    """Return a new policy.

    Parameters
    ----------
    costs : CostModel, optional
        Of the model, for "flops"; those of a model of some 4B parameters if not given.

    Raises
    ------
    CacheConfigError
        If there is none of that name; the message names those that there are.
    """
    made: dict[str, Callable[[], Policy]] = {
        "lru": LeastRecentlyUsed,
        "flops": lambda: FlopAware() if costs is None else FlopAware.of(costs),
    }
    if not isinstance(name, str) or name not in made:
        raise CacheConfigError(f"The eviction policy must be one of {', '.join(made)}, got {name!r}.")
    return made[name]()
