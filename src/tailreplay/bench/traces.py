"""Traffic to replay: who sends which tokens when, made from a seed and one request at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

VOCABULARY = 150_000
Tokens = np.ndarray  # one dimension, uint32


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request of a trace.

    Attributes
    ----------
    at : float
        Seconds since the trace's start; never less than the request before.
    prompt : numpy.ndarray
        Token ids, shape (tokens,), uint32.
    output : numpy.ndarray
        Token ids of the answer, likewise.
    tenant : str
        Salt that it is stored under.
    """

    at: float
    prompt: Tokens
    output: Tokens
    tenant: str = ""


@dataclass(frozen=True)
class Trace:
    """A trace that can be read again and again; only what is under way is in memory.

    Attributes
    ----------
    name : str
        As people write it.
    start : callable
        Begins it anew; each time the same requests come.
    """

    name: str
    start: Callable[[], Iterator[Request]] = field(repr=False)

    def __iter__(self) -> Iterator[Request]:
        return self.start()


class _Source:
    """Random numbers of one trace."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self._now = 0.0

    def tokens(self, low: int, high: int) -> Tokens:
        """Return from `low` to `high` tokens that were never seen before; short runs are much more frequent."""
        return self.exactly(round(float(np.exp(self.rng.uniform(np.log(low), np.log(high))))))

    def exactly(self, count: int) -> Tokens:
        """Return `count` tokens that were never seen before."""
        return self.rng.integers(VOCABULARY, size=count, dtype=np.uint32)

    def request(self, prompt: Tokens, output: Tokens) -> Request:
        """Return the next request; requests come as a Poisson process, one a second."""
        self._now += float(self.rng.exponential())
        return Request(self._now, prompt, output)


def shared_prompts(requests: int, seed: int = 0, prompts: int = 200, skew: float = 1.0) -> Iterator[Request]:
    """Yield questions after one of `prompts` system prompts, of which the n-th is asked for as ``n ** -skew``."""
    source = _Source(seed)
    systems = [source.tokens(500, 8_000) for _ in range(prompts)]
    weights = np.arange(1, prompts + 1) ** -skew
    for index in source.rng.choice(prompts, size=requests, p=weights / weights.sum()):
        question = source.tokens(20, 400)
        yield source.request(np.concatenate([systems[index], question]), source.tokens(50, 400))


@dataclass
class _Agent:
    """A tree of steps: `points` are the sequences that it may go on from."""

    points: list[Tokens]
    steps: int


def branching_agents(requests: int, seed: int = 0, agents: int = 24, most: int = 32_000) -> Iterator[Request]:
    """Yield steps of `agents` agents at once, each a tree over one of a few long common prefixes.

    A step goes on from the last one, or (one in five) returns to an earlier step and branches off there. An agent that is
    done, or at `most` tokens, makes place for a new one.
    """
    source = _Source(seed)
    rng = source.rng
    common = [source.tokens(2_000, 6_000) for _ in range(5)]

    def begin() -> _Agent:
        task = source.tokens(100, 1_000)
        return _Agent([np.concatenate([common[rng.integers(len(common))], task])], int(rng.integers(5, 60)))

    active = [begin() for _ in range(agents)]
    for _ in range(requests):
        which = int(rng.integers(agents))
        agent = active[which]
        back = int(rng.integers(len(agent.points))) if rng.random() < 0.2 else -1
        prompt, output = agent.points[back], source.tokens(30, 600)
        yield source.request(prompt, output)
        agent.points.append(np.concatenate([prompt, output, source.tokens(50, 2_000)]))
        agent.steps -= 1
        if not agent.steps or len(agent.points[-1]) > most:
            active[which] = begin()


@dataclass
class _Chat:
    history: Tokens
    weight: float
    """How eager the user is: chats differ much in how soon the next turn comes."""


def long_chats(requests: int, seed: int = 0, users: int = 60, most: int = 48_000) -> Iterator[Request]:
    """Yield turns of `users` chats at once that grow up to `most` tokens; one turn in 25 is a chat's last.

    All begin with one short system prompt. Some users come back soon, others after long; those who do not come back are
    replaced.
    """
    source = _Source(seed)
    rng = source.rng
    system = source.exactly(300)

    def begin() -> _Chat:
        first = source.tokens(20, 6_000) if rng.random() < 0.3 else source.tokens(20, 300)  # some paste a document
        return _Chat(np.concatenate([system, first]), float(rng.lognormal(0.0, 1.5)))

    active = [begin() for _ in range(users)]
    for _ in range(requests):
        weights = np.array([chat.weight for chat in active])
        which = int(rng.choice(users, p=weights / weights.sum()))
        chat = active[which]
        output = source.tokens(50, 1_000)
        yield source.request(chat.history, output)
        chat.history = np.concatenate([chat.history, output, source.tokens(15, 500)])
        if rng.random() < 0.04 or len(chat.history) > most:
            active[which] = begin()


def mixed(requests: int, seed: int = 0) -> Iterator[Request]:
    """Yield the three kinds in random order: a half chats, a third agents, the rest questions after system prompts."""
    source = _Source(seed)
    kinds = [
        long_chats(requests, seed + 1),
        branching_agents(requests, seed + 2),
        shared_prompts(requests, seed + 3),
    ]
    for kind in source.rng.choice(3, size=requests, p=[1 / 2, 1 / 3, 1 / 6]):
        request = next(kinds[kind])
        yield source.request(request.prompt, request.output)


GENERATORS: dict[str, Callable[[int, int], Iterator[Request]]] = {
    "prompts": shared_prompts,
    "agents": branching_agents,
    "chats": long_chats,
    "mix": mixed,
}


def made_trace(name: str, requests: int, seed: int) -> Trace:
    """Return a trace of `requests` requests by one of `GENERATORS`."""
    return Trace(name, lambda: GENERATORS[name](requests, seed))
