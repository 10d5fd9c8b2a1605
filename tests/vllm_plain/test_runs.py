"""Pages that are stored together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tailreplay.engines.vllm.runs import runs

PAGE, BLOCK = 64, 528


@dataclass(frozen=True)
class Put:
    """As in `messages`, which needs vLLM."""

    request: str
    slot: int
    blocks: tuple[int, ...]
    start: int
    count: int
    hidden_slot: int


def page(request: str, number: int, count: int = PAGE, slot: int = 0, hidden_slot: int = 0) -> Any:
    start = number * PAGE
    blocks = tuple(range(100 + start // BLOCK, 100 - (-(start + count) // BLOCK)))
    return Put(request, slot, blocks, start, count, hidden_slot)


def test_a_chunk_of_a_prompt_is_one_run_with_each_block_once() -> None:
    (run,) = runs([page("a", number) for number in range(30)], PAGE, BLOCK)
    assert (run.start, run.count) == (0, 30 * PAGE)
    assert run.blocks == tuple(range(100, 104))


@given(st.lists(st.tuples(st.sampled_from("ab"), st.booleans(), st.sampled_from([-1, 3]), st.sampled_from([-1, 5]))))
def test_runs_hold_every_put_in_order_and_join_only_what_can_be_joined(drawn: list[tuple[str, bool, int, int]]) -> None:
    ends, puts = {"a": 0, "b": 0}, []
    for request, partial, slot, hidden_slot in drawn:
        puts.append(page(request, ends[request], 10 if partial else PAGE, slot, hidden_slot))
        ends[request] += not partial
    found = list(runs(puts, PAGE, BLOCK))
    assert [put for run in found for put in run.puts] == puts
    for run in found:
        assert {put.request for put in run.puts} == {run.request}
        assert len(run.puts) == 1 or min(run.slots + run.hidden_slots) >= 0
        assert all(put.count == PAGE for put in run.puts[:-1])
        assert run.blocks == tuple(range(100 + run.start // BLOCK, 100 - (-(run.start + run.count) // BLOCK)))
        assert [single.puts for single in run.singly(BLOCK)] == [(put,) for put in run.puts]
