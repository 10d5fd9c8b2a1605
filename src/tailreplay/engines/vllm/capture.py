"""What forwards compute, on its way to pages: hiddens of running requests, and the pages that steps fill."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

import torch

from tailreplay.engines.vllm.compat import Geometry, TensorRanks
from tailreplay.engines.vllm.held import HeldHiddens, step_rows
from tailreplay.engines.vllm.messages import Put, Rows
from tailreplay.engines.vllm.runs import Run, runs
from tailreplay.engines.vllm.store import PageStore

log = logging.getLogger("vllm.tailreplay")


class Capture:
    """Holds hiddens from the forward that computes them to the page that they fill. One thread.

    Parameters
    ----------
    taps : sequence of torch.Tensor
        See `plugin.TappedModel`.
    """

    def __init__(self, taps: Sequence[torch.Tensor], store: PageStore, ranks: TensorRanks, geometry: Geometry) -> None:
        self._taps = taps
        self._store = store
        self._ranks = ranks
        self._geometry = geometry
        self._taps_write: bool | None = None
        self._held: dict[str, HeldHiddens] = {}

    @property
    def requests(self) -> int:
        """How many requests' hiddens are held."""
        return len(self._held)

    def collect(self, rows: Sequence[Rows], first: Mapping[str, int]) -> None:
        """Copy a step's hiddens out of the taps. Mutates self.

        Parameters
        ----------
        first : mapping
            Request -> its first row in the batch; requests that are not in it computed nothing.
        """
        rows = [row for row in rows if row.request in first]
        if not rows or not self._check_taps(first[rows[0].request]):
            return
        try:
            copies = step_rows([self._ranks.share(tap) for tap in self._taps], rows, first)
        except Exception:
            # For lack of memory, say. Answers do not depend on it.
            log.exception("Not storing more of %d requests, since their hiddens could not be copied.", len(rows))
            for row in rows:
                self.forget(row.request)
            return
        for row in rows:
            held = self._held.get(row.request)
            if held is None:
                held = self._held[row.request] = HeldHiddens(row.start)
            try:
                held.add(row.start, copies[row.request])
            except ValueError as error:
                # Nothing more of it is stored, for lack of what comes before.
                log.warning("Not storing more of a request: %s.", error)
                del self._held[row.request]

    def hold(self, request: str, start: int, hiddens: torch.Tensor | None) -> None:
        """Begin with token `start` of a request, and its hiddens from there on where there are some. Mutates self.

        Parameters
        ----------
        hiddens : torch.Tensor or None
            Shape ``(stored groups, tokens, width)``.
        """
        held = self._held[request] = HeldHiddens(start)
        if hiddens is not None:
            held.add(start, hiddens)

    def forget(self, request: str) -> None:
        """Let go of what is held for a request, if anything is."""
        self._held.pop(request, None)

    def store(self, puts: Sequence[Put]) -> Iterator[tuple[Put, bool]]:
        """Write pages, and yield each put with whether its page was stored. Mutates the store."""
        broken: set[str] = set()
        size = self._geometry.block_size
        for run in runs(puts, self._geometry.page_size, size):
            if run.request not in broken and self._put(run):
                yield from ((put, True) for put in run.puts)
                continue
            for single in run.singly(size):
                good = run.request not in broken and len(run.puts) > 1 and self._put(single)
                yield single.puts[0], good
                if not good:
                    # What follows a page that is missing could never be matched.
                    broken.add(run.request)
                    self.forget(run.request)
        self._release(puts)

    def _release(self, puts: Sequence[Put]) -> None:
        """Let go of hiddens that are in full pages; a page that is not full will be stored again."""
        needed = {put.request: put.start + (put.count if put.count == self._geometry.page_size else 0) for put in puts}
        for request, start in needed.items():
            held = self._held.get(request)
            if held is not None:
                held.release(start)

    def _put(self, run: Run) -> bool:
        held = self._held.get(run.request)
        if held is None:
            return False  # `collect` has said why
        try:
            self._store.put(run, held.take(run.start, run.count))
        except Exception:
            log.exception("Storing pages failed.")
            return False
        return True

    def _check_taps(self, row: int) -> bool:
        """Whether forwards write the taps: a model compiled for another connector has none, and vLLM may reuse it."""
        if self._taps_write is None:
            self._taps_write = not any(bool(tap[row].isnan().all()) for tap in self._taps)
            if not self._taps_write:
                log.error(
                    "Nothing is cached: vLLM runs a compiled model that was saved without tailreplay. Start it once with "
                    "VLLM_DISABLE_COMPILE_CACHE=1, or empty its compile cache."
                )
        return self._taps_write
