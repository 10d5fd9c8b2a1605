"""An open-loop load: requests of a trace go out when they are due, whatever became of the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tailreplay.bench.endpoint import Answered, Endpoint, EndpointError
from tailreplay.bench.traces import Request, Tokens


@dataclass
class Outcome:
    """What became of one request; times are seconds since the load's start.

    Attributes
    ----------
    index : int
        Of the request in the trace.
    arrival : float
        When the trace has it.
    due : float
        When it could be sent: on arrival, or when the answer that it goes on from was there.
    sent : float
        When it was: later than `due` if there were too many under way.
    prompt : numpy.ndarray
        Its tokens, with the server's own answers in them where they were known.
    answered : Answered or None
        None if it failed.
    error : str
        Why it failed.
    """

    index: int
    arrival: float
    due: float
    sent: float
    prompt: Tokens
    ended: float = 0.0
    answered: Answered | None = None
    error: str = ""

    @property
    def ttft(self) -> float:
        """Seconds from when it was due to its first token: waiting for one's turn counts."""
        assert self.answered is not None
        return self.sent - self.due + self.answered.ttft


class Load:
    """Sends a trace's requests to a server.

    Parameters
    ----------
    requests : sequence of Request
        See `trace_plan.prepared`.
    concurrency : int or None
        Most requests under way at once.
    outcomes : list of Outcome
        Those of requests that have ended are appended while `run` runs, so that they are there when it is interrupted.
    """

    def __init__(
        self, endpoint: Endpoint, requests: Sequence[Request], concurrency: int | None, outcomes: list[Outcome]
    ) -> None:
        self._outcomes = outcomes
        self._endpoint = endpoint
        self._requests = requests
        self._turns = asyncio.Semaphore(concurrency or len(requests) or 1)
        self._ended = [asyncio.Event() for _ in requests]
        self._ends = [0.0] * len(requests)
        self._answers: dict[int, tuple[int, ...]] = {}
        self._start = 0.0

    async def run(self) -> None:
        """Send all requests and wait for all answers. Failures are outcomes, too."""
        self._start = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for index in range(len(self._requests)):
                tasks.create_task(self._one(index))

    async def _one(self, index: int) -> None:
        request = self._requests[index]
        await asyncio.sleep(max(request.at - self._now(), 0))
        for said in request.said:
            await self._ended[said.of].wait()
        # Not "now": where the machine is late, the wait is the request's.
        due = max([request.at, *(self._ends[said.of] for said in request.said)])
        async with self._turns:
            outcome = Outcome(index, request.at, due, self._now(), self._with_answers(request))
            try:
                outcome.answered = await self._endpoint.complete(outcome.prompt.tolist(), max(len(request.output), 1))
                if outcome.answered.tokens is not None:
                    self._answers[index] = outcome.answered.tokens
            except EndpointError as error:
                outcome.error = str(error)
            outcome.ended = self._ends[index] = self._now()
            self._outcomes.append(outcome)
            self._ended[index].set()

    def _with_answers(self, request: Request) -> Tokens:
        """Return the prompt with the server's own answers, as far as it told their tokens and they were long enough."""
        prompt = request.prompt.copy()
        for said in request.said:
            mine = self._answers.get(said.of, ())[said.begin : said.end]
            prompt[said.at : said.at + len(mine)] = np.array(mine, np.uint32)
        return prompt

    def _now(self) -> float:
        return time.perf_counter() - self._start
