"""How much of a task's prompts was reused."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tailreplay.engines.transformers.results import ReuseReport


@dataclass
class Tally:
    """Sums over a task's requests. Mutated by `add`.

    Attributes
    ----------
    requests : int
    contexts : int
        Contexts that were computed for them; requests in a row about one context share it.
    prompt_tokens, reused, replayed : int
        Tokens of the prompts, those whose keys and values came from the cache, and those of them that were replayed.
    """

    requests: int = 0
    contexts: int = 0
    prompt_tokens: int = 0
    reused: int = 0
    replayed: int = 0

    def add(self, report: ReuseReport, contexts: int) -> None:
        """Count one request, for which `contexts` contexts were computed."""
        self.requests += 1
        self.contexts += contexts
        self.prompt_tokens += report.prompt_tokens
        self.reused += report.matched
        self.replayed += report.replayed

    @property
    def reused_share(self) -> float:
        """Reused share of the prompts' tokens."""
        return self.reused / self.prompt_tokens if self.prompt_tokens else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the sums and the share as plain data."""
        return {**asdict(self), "reused_share": self.reused_share}
