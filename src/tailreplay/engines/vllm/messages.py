"""What the scheduler's side tells the worker's side in a step, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field

from tailreplay.engines.vllm.compat import KVConnectorMetadata, KVConnectorWorkerMetadata
from tailreplay.provenance import Start
from tailreplay.tiers.orders import Fetch, Spill


@dataclass(frozen=True)
class Rows:
    """Where a request's tokens are in this step's batch.

    Attributes
    ----------
    start : int
        Position of the first of them in the sequence.
    first_slot : int
        Physical cache slot of that token: tells which row it is, whatever the order of the batch.
    """

    request: str
    start: int
    count: int
    first_slot: int


@dataclass(frozen=True)
class Put:
    """Store one page after this step's forward.

    Attributes
    ----------
    tag : int
        Names it in the report.
    blocks : tuple of int
        Attention blocks that hold the page's keys and values, from the one of token `start` on.
    start, count : int
        Its tokens; a page that is not full is a sequence's last one.
    hidden_slot : int
        Where its hiddens go; -1 if there is no room for them.
    spill : Spill or None
        Then write it to the tiers below, too.
    """

    tag: int
    request: str
    slot: int
    blocks: tuple[int, ...]
    start: int
    count: int
    hidden_slot: int
    spill: Spill | None = None


@dataclass(frozen=True)
class Save:
    """Store the states that a request has now as an anchor.

    Attributes
    ----------
    tag : int
        Names it in the report.
    slot : int
        Where they go.
    states : dict
        Block of each state group that holds them.
    """

    tag: int
    slot: int
    states: dict[int, int]


@dataclass(frozen=True)
class Load:
    """Restore a prefix: copy its pages, replay its tail.

    Attributes
    ----------
    slots, hidden_slots : tuple of int
        Page by page: where its keys and values, and its hiddens, are stored; -1 for hiddens that are gone.
    blocks : tuple of int
        The request's attention blocks, from its first token on.
    present : int
        Tokens whose keys and values are there already, in blocks that others may share; a multiple of the block size.
    matched : int
        Tokens to restore; the last page may be used in part.
    tail : int
        Tokens to replay.
    tail_ids : tuple of int
        Their ids, for the embedding group.
    states : dict
        Block of each state group that the request's first forward reads.
    waits : bool
        Whether this step's forward already uses the result (a synchronous load).
    anchor : int
        Slot of the states that the tail begins with; -1 for none.
    save : Save or None
        What to store of the result.
    start : Start
        What the tail begins with.
    calibrates : int
        Tag of the mean state that is made of this replay; 0 for none.
    """

    request: str
    slots: tuple[int, ...]
    hidden_slots: tuple[int, ...]
    blocks: tuple[int, ...]
    present: int
    matched: int
    tail: int
    tail_ids: tuple[int, ...]
    states: dict[int, int]
    waits: bool = False
    anchor: int = -1
    save: Save | None = None
    start: Start = Start.ZERO
    calibrates: int = 0


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Orders for one step, in the order of their obeying: restarts, rows, puts, saves, forgets; loads as time allows.

    Attributes
    ----------
    page_size : int
        What the scheduler takes a page to be. Both sides read it from the configuration; they must agree.
    replay_tokens : int
        Most tokens to replay after this step's forward; what it waits for (synchronous loads) does not count.
    decoding : bool
        Whether that forward only decodes.
    void : int
        Mean states with this tag or a lower one are to be dropped.
    """

    page_size: int
    replay_tokens: int = 0
    decoding: bool = False
    void: int = 0
    rows: list[Rows] = field(default_factory=list)
    puts: list[Put] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    """Pages to bring up from tiers below, in time."""
    spills: list[Spill] = field(default_factory=list)
    """Pages to write to tiers below, in time."""
    finals: list[str] = field(default_factory=list)
    """Requests that have ended and whose last orders are in `puts` and `saves`: report them as sent."""
    restarts: list[str] = field(default_factory=list)
    """Requests that begin again (preempted, or their load failed on some rank): drop the hiddens held for them first."""
    forgets: list[str] = field(default_factory=list)
    """Requests that have ended: drop the hiddens held for them last."""


@dataclass
class StepReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What became of puts and loads in one step."""

    stored: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    damaged: set[int] = field(default_factory=set)
    """Slots of keys and values of pages whose bytes are not what was stored."""
    damaged_anchors: set[int] = field(default_factory=set)
    saved: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Saves by tag: how many ranks ended them in this step, and how many of these failed."""
    moved: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Fetches and spills by tag: how many ranks ended them in this step, and how many of these failed."""
    loaded: set[str] = field(default_factory=set)
    """Requests whose synchronous load has ended; asynchronous ones are reported to vLLM."""
    load_seconds: float = 0.0
    replay_seconds: float = 0.0
    replayed: int = 0
    """Tokens replayed after the step's forward."""
    decoding: bool = False
    mean: int = 0
    """Tag of the mean state that is there now; 0 for none."""

    def aggregate(self, other: StepReport) -> StepReport:
        """Join two ranks' reports: a page counts only if every rank has it."""
        failed = self.failed | other.failed
        return StepReport(
            (self.stored & other.stored) - failed,
            failed,
            self.damaged | other.damaged,
            self.damaged_anchors | other.damaged_anchors,
            _sum(self.saved, other.saved),
            _sum(self.moved, other.moved),
            self.loaded | other.loaded,
            max(self.load_seconds, other.load_seconds),
            max(self.replay_seconds, other.replay_seconds),
            max(self.replayed, other.replayed),
            self.decoding and other.decoding,
            self.mean if self.mean == other.mean else 0,
        )


def _sum(one: dict[int, tuple[int, int]], other: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """Add up how many ranks ended an order, and how many failed, by tag."""
    both = dict(one)
    for tag, (ended, failures) in other.items():
        before = both.get(tag, (0, 0))
        both[tag] = before[0] + ended, before[1] + failures
    return both
