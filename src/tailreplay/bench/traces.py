"""Traffic to replay: who sends which tokens when, made from a seed and one request at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

VOCABULARY = 150_000
Tokens = np.ndarray  # one dimension, uint32


@dataclass(frozen=True, slots=True)
class Said:
    """Where a prompt holds part of the answer to an earlier request, so that a live server's own can be put there.

    Attributes
    ----------
    at : int
        Place in the prompt.
    of : int
        Which request was answered, counted from the trace's first.
    begin, end : int
        Which part of its answer.
    """

    at: int
    of: int
    begin: int
    end: int


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
    said : tuple of Said
        Earlier answers in the prompt, in its order.
    """

    at: float
    prompt: Tokens
    output: Tokens
    tenant: str = ""
    said: tuple[Said, ...] = ()


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
    """Random numbers of one trace, whose lengths are all multiplied by `scale`."""

    def __init__(self, seed: int, scale: float = 1.0) -> None:
        self.rng = np.random.default_rng(seed)
        self._scale = scale
        self._now = 0.0
        self._requests = 0

    def tokens(self, low: int, high: int) -> Tokens:
        """Return from `low` to `high` tokens that were never seen before; short runs are much more frequent."""
        return self.exactly(round(float(np.exp(self.rng.uniform(np.log(low), np.log(high))))))

    def exactly(self, count: int) -> Tokens:
        """Return `count` tokens that were never seen before."""
        return self.rng.integers(VOCABULARY, size=max(round(count * self._scale), 1), dtype=np.uint32)

    def is_more(self, text: _Text, tokens: int) -> bool:
        """Whether a text is longer than `tokens`."""
        return len(text.tokens) > tokens * self._scale

    def request(self, text: _Text, output: Tokens) -> tuple[Request, _Text]:
        """Return the next request, and the text with its answer; requests come as a Poisson process, one a second."""
        self._now += float(self.rng.exponential())
        self._requests += 1
        return Request(self._now, text.tokens, output, said=text.said), text.answered(output, self._requests - 1)


@dataclass(frozen=True, slots=True, eq=False)
class _Text:
    """Tokens of a prompt to be, and which of them are answers."""

    tokens: Tokens
    said: tuple[Said, ...] = ()

    def then(self, tokens: Tokens) -> _Text:
        return _Text(np.concatenate([self.tokens, tokens]), self.said)

    def answered(self, output: Tokens, of: int, begin: int = 0) -> _Text:
        said = Said(len(self.tokens), of, begin, len(output))
        return _Text(np.concatenate([self.tokens, output[begin:]]), (*self.said, said))

    def without_thinking(self, before: _Text, share: float) -> _Text:
        """Return the text `before` this one and its answer, of which the first `share` is gone."""
        answer = self.said[-1]
        return before.answered(self.tokens[answer.at :], answer.of, round(share * (answer.end - answer.begin)))


def shared_prompts(
    requests: int, seed: int = 0, prompts: int = 200, skew: float = 1.0, scale: float = 1.0
) -> Iterator[Request]:
    """Yield questions after one of `prompts` system prompts, of which the n-th is asked for as ``n ** -skew``."""
    source = _Source(seed, scale)
    systems = [source.tokens(500, 8_000) for _ in range(prompts)]
    weights = np.arange(1, prompts + 1) ** -skew
    for index in source.rng.choice(prompts, size=requests, p=weights / weights.sum()):
        question = source.tokens(20, 400)
        yield source.request(_Text(systems[index]).then(question), source.tokens(50, 400))[0]


@dataclass
class _Agent:
    """A tree of steps: `points` are the sequences that it may go on from."""

    points: list[_Text]
    steps: int


def branching_agents(
    requests: int, seed: int = 0, agents: int = 24, most: int = 32_000, scale: float = 1.0
) -> Iterator[Request]:
    """Yield steps of `agents` agents at once, each a tree over one of a few long common prefixes.

    A step goes on from the last one, or (one in five) returns to an earlier step and branches off there. An agent that is
    done, or at `most` tokens, makes place for a new one.
    """
    source = _Source(seed, scale)
    rng = source.rng
    common = [source.tokens(2_000, 6_000) for _ in range(5)]

    def begin() -> _Agent:
        task = source.tokens(100, 1_000)
        return _Agent([_Text(common[rng.integers(len(common))]).then(task)], int(rng.integers(5, 60)))

    active = [begin() for _ in range(agents)]
    for _ in range(requests):
        which = int(rng.integers(agents))
        agent = active[which]
        back = int(rng.integers(len(agent.points))) if rng.random() < 0.2 else -1
        prompt, output = agent.points[back], source.tokens(30, 600)
        request, answered = source.request(prompt, output)
        yield request
        agent.points.append(answered.then(source.tokens(50, 2_000)))
        agent.steps -= 1
        if not agent.steps or source.is_more(agent.points[-1], most):
            active[which] = begin()


@dataclass
class _Chat:
    history: _Text
    weight: float
    """How eager the user is: chats differ much in how soon the next turn comes."""


def long_chats(
    requests: int, seed: int = 0, users: int = 60, most: int = 48_000, scale: float = 1.0, thinking: float = 0.0
) -> Iterator[Request]:
    """Yield turns of `users` chats at once that grow up to `most` tokens; one turn in 25 is a chat's last.

    All begin with one short system prompt. Some users come back soon, others after long; those who do not come back are
    replaced. The first `thinking` of each answer (a share) is missing from later prompts.
    """
    source = _Source(seed, scale)
    rng = source.rng
    system = source.exactly(300)

    def begin() -> _Chat:
        first = source.tokens(20, 6_000) if rng.random() < 0.3 else source.tokens(20, 300)  # some paste a document
        return _Chat(_Text(system).then(first), float(rng.lognormal(0.0, 1.5)))

    active = [begin() for _ in range(users)]
    for _ in range(requests):
        weights = np.array([chat.weight for chat in active])
        which = int(rng.choice(users, p=weights / weights.sum()))
        chat = active[which]
        output = source.tokens(50, 1_000)
        request, answered = source.request(chat.history, output)
        yield request
        if thinking:
            answered = answered.without_thinking(chat.history, thinking)
        chat.history = answered.then(source.tokens(15, 500))
        if rng.random() < 0.04 or source.is_more(chat.history, most):
            active[which] = begin()


def thinking_chats(requests: int, seed: int = 0, scale: float = 1.0) -> Iterator[Request]:
    """Yield chats as `long_chats` does, in which the first 70% of each answer is thinking that later prompts leave out."""
    return long_chats(requests, seed, scale=scale, thinking=0.7)


def mixed(requests: int, seed: int = 0, scale: float = 1.0) -> Iterator[Request]:
    """Yield the three kinds in random order: a half chats, a third agents, the rest questions after system prompts."""
    source = _Source(seed)
    kinds = [
        long_chats(requests, seed + 1, scale=scale),
        branching_agents(requests, seed + 2, scale=scale),
        shared_prompts(requests, seed + 3, scale=scale),
    ]
    places: list[list[int]] = [[], [], []]  # of each kind's requests in this trace
    for place, kind in enumerate(source.rng.choice(3, size=requests, p=[1 / 2, 1 / 3, 1 / 6])):
        request = next(kinds[kind])
        places[kind].append(place)
        said = tuple(replace(each, of=places[kind][each.of]) for each in request.said)
        yield source.request(_Text(request.prompt, said), request.output)[0]


GENERATORS: dict[str, Callable[..., Iterator[Request]]] = {
    "prompts": shared_prompts,
    "agents": branching_agents,
    "chats": long_chats,
    "mix": mixed,
    "thinking": thinking_chats,
}


def made_trace(name: str, requests: int, seed: int, scale: float = 1.0) -> Trace:
    """Return a trace of `requests` requests by one of `GENERATORS`, all lengths multiplied by `scale`."""
    return Trace(name, lambda: GENERATORS[name](requests, seed, scale=scale))
