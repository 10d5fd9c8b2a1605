"""From taps to pages: what is stored, what is not, and what stays in memory. No engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tailreplay.engines.vllm.capture import Capture
from tailreplay.engines.vllm.compat import TensorRanks
from tailreplay.engines.vllm.messages import Put, Rows
from tailreplay.engines.vllm.runs import Run
from tests.vllm_live.test_blocks import BLOCK, geometry

PAGE = 64


class Store:
    """Keeps the hiddens of each page by its tag; refuses runs with a tag in `bad`."""

    def __init__(self) -> None:
        self.pages: dict[int, torch.Tensor] = {}
        self.bad: set[int] = set()

    def put(self, run: Run, hiddens: torch.Tensor) -> None:
        if self.bad & {put.tag for put in run.puts}:
            raise ValueError("not a number")
        for put in run.puts:
            at = put.start - run.start
            self.pages[put.tag] = hiddens[:, at : at + put.count].clone()


def capture(rows: int = 4096) -> tuple[Capture, Store, torch.Tensor]:
    store, tap = Store(), torch.zeros(rows, 2)
    stand_in: Any = store
    return Capture([tap, tap], stand_in, TensorRanks(), geometry(PAGE)), store, tap


def put(tag: int, request: str, count: int = PAGE) -> Put:
    start = tag * PAGE
    blocks = tuple(range(start // BLOCK, -(-(start + count) // BLOCK)))
    return Put(tag, request, tag, blocks, start, count, tag)


def forward(tap: torch.Tensor, start: int, count: int) -> None:
    tap.fill_(-1)
    tap[:count] = torch.arange(start, start + count)[:, None]


def test_a_prompt_in_chunks_is_stored_and_only_its_last_page_is_held() -> None:
    made, store, tap = capture()
    done = 0
    for chunk in (2048, 2048, 100):
        forward(tap, done, chunk)
        made.collect([Rows("a", done, chunk, 0)], {"a": 0})
        pages = range(done // PAGE, (done + chunk) // PAGE)
        done += chunk
        assert [good for _, good in made.store([put(page, "a") for page in pages])] == [True] * len(pages)
        held = sum(rows.untyped_storage().nbytes() for rows in made._held["a"]._chunks)
        assert held <= 2 * PAGE * 2 * 4
    for page, hiddens in store.pages.items():
        assert hiddens[0, :, 0].tolist() == list(range(page * PAGE, page * PAGE + PAGE))
    # The prompt's end, then the page that it has become.
    assert list(made.store([put(65, "a", 36)])) == [(put(65, "a", 36), True)]
    for at in range(4196, 4224):
        forward(tap, at, 1)
        made.collect([Rows("a", at, 1, 0)], {"a": 0})
    assert list(made.store([put(65, "a")])) == [(put(65, "a"), True)]
    assert store.pages[65][1, :, 1].tolist() == list(range(4160, 4224))


def test_pages_before_one_that_fails_are_stored_and_those_after_it_are_not() -> None:
    made, store, tap = capture()
    store.bad = {3}
    forward(tap, 0, 640)
    made.collect([Rows("a", 0, 320, 0), Rows("b", 0, 320, 0)], {"a": 0, "b": 320})
    told = [
        (one.request, one.tag, good) for one, good in made.store([put(tag, name) for name in "ab" for tag in range(5)])
    ]
    assert told == [(name, tag, tag < 3) for name in "ab" for tag in range(5)]
    # Nothing more of them can be stored, so nothing is held.
    assert made.requests == 0


def test_hiddens_that_cannot_be_copied_end_the_storing_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _, tap = capture()
    forward(tap, 0, 64)
    made.collect([Rows("a", 0, 64, 0)], {"a": 0})

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr("tailreplay.engines.vllm.capture.step_rows", full)
    made.collect([Rows("a", 64, 64, 0), Rows("b", 0, 8, 0)], {"a": 0, "b": 64})
    assert made.requests == 0
    assert list(made.store([put(1, "a")])) == [(put(1, "a"), False)]


def test_a_request_that_was_not_in_the_batch_computed_nothing() -> None:
    made, _, tap = capture()
    forward(tap, 0, 64)
    made.collect([Rows("a", 0, 64, 0)], {})
    assert made.requests == 0


def test_a_model_without_taps_stores_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """As when vLLM takes a compiled model from its cache that was saved without them: no forward writes them."""
    made, _, tap = capture()
    tap.fill_(torch.nan)
    for step in range(2):
        made.collect([Rows("a", step, 1, 0)], {"a": 0})
    assert made.requests == 0
    assert list(made.store([put(0, "a")])) == [(put(0, "a"), False)]
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "compiled model that was saved without tailreplay" in said
