"""What the scheduler's side knows of one request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tailreplay.engines.vllm.compat import Geometry
from tailreplay.engines.vllm.messages import Load
from tailreplay.engines.vllm.settings import RequestOptions
from tailreplay.keys import Namespace
from tailreplay.page import Page
from tailreplay.plan import ReplayPlan
from tailreplay.provenance import EXACT, Provenance


@dataclass
class Tracked:
    """A request from its first look-up to its end.

    Attributes
    ----------
    request : vllm Request
        Read; only `compat.isolate` changes it.
    expected : bytes
        Encoded tokens (see `tailreplay.keys.token_bytes`) that will be in the cache: its prompt; at its end, all of them.
    plan : ReplayPlan or None
        Its pages are pinned while it is here: from the look-up until the load has ended.
    present : int
        Tokens that vLLM's own prefix cache has for it.
    isolated : bool
        Whether its blocks are kept out of vLLM's own prefix cache.
    loading : bool
        Whether the worker is restoring the plan.
    page : Page or None
        Last stored page, pinned: the next one goes after it. None while nothing can be stored.
    stored : int
        Tokens in pages so far, those in flight included.
    computed : int
        Tokens computed when the steps scheduled so far have run.
    provenance : Provenance
        Of the pages that it stores.
    behind : Provenance
        Of what it computes, before host memory's codec: of its states.
    saved : int
        Tokens after which its states were saved, or looked at for saving, last.
    in_flight : bool
        Whether it has blocks and has not ended.
    ended_prefill : bool
        Whether the end of the prompt has been dealt with.
    puts : int
        Pages that the worker has not confirmed yet.
    looked_below : int
        How often the tiers below host memory have been asked for its prompt.
    look_again : bool
        Whether less came from there than was found: other hiddens are needed.
    load_failed : bool
        Whether a load failed: it is not tried again for this request.
    waits_for : Tracked or None
        Another request whose prefix this one waits for, and how far that one was.
    first_asked : float
        Monotonic time of the first look-up, 0 before it; bounds the wait for another request's prefix.
    """

    request: Any
    namespace: Namespace
    options: RequestOptions
    expected: bytes
    first_asked: float = 0.0
    plan: ReplayPlan | None = None
    present: int = 0
    isolated: bool = False
    loading: bool = False
    page: Page | None = None
    stored: int = 0
    computed: int = 0
    provenance: Provenance = EXACT
    behind: Provenance = EXACT
    saved: int = 0
    in_flight: bool = False
    ended_prefill: bool = False
    puts: int = 0
    looked_below: int = 0
    look_again: bool = False
    load_failed: bool = False
    waits_for: tuple[Tracked, int, int] | None = None
    report: dict[str, Any] | None = None

    @property
    def is_storing(self) -> bool:
        """Whether more of `expected` will be in the cache soon, so that others may wait for it."""
        if self.puts:
            return True
        return self.in_flight and self.page is not None and self.computed < self.request.num_prompt_tokens


def load_of(tracked: Tracked, plan: ReplayPlan, blocks: tuple[list[int], ...], geometry: Geometry, waits: bool) -> Load:
    """Return the order that restores a plan into the blocks that vLLM has given a request.

    Parameters
    ----------
    waits : bool
        Whether this step's forward already uses the result.
    """
    ids = list(tracked.request.all_token_ids[plan.matched - plan.replayed : plan.matched])
    return Load(
        request=tracked.request.request_id,
        slots=tuple(page.slot for page in plan.pages),
        hidden_slots=tuple(page.hidden_slot for page in plan.pages),
        blocks=tuple(blocks[geometry.attention_group][: -(-plan.matched // geometry.block_size)]),
        present=tracked.present,
        matched=plan.matched,
        tail=plan.replayed,
        tail_ids=tuple(ids),
        states=geometry.state_blocks(blocks, plan.matched),
        waits=waits,
        anchor=plan.anchor.slot if plan.anchor is not None else -1,
        start=plan.start,
    )
