"""`tailreplay bench eviction`: hits counted by hand, what bounds what, and the command."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tailreplay.bench.eviction import UNLIMITED, Bench, Setup, render, setups_of
from tailreplay.bench.eviction_future import NEVER, Clairvoyant, look_ahead, most_hits
from tailreplay.bench.shape_costs import qwen35_4b
from tailreplay.bench.traces import GENERATORS, Request, Trace, made_trace
from tailreplay.cli import main

PAGE = 16
COSTS = qwen35_4b()
NOTHING = np.zeros(0, dtype=np.uint32)


def trace_of(*prompts: str) -> Trace:
    """One request a word, one page a letter, with nothing as an answer."""
    requests = [
        Request(float(at), np.repeat(np.frombuffer(word.encode(), dtype=np.uint8), PAGE).astype(np.uint32), NOTHING)
        for at, word in enumerate(prompts)
    ]
    return Trace("letters", lambda: iter(requests))


def random_trace(seed: int) -> Trace:
    """Short words over few letters, so that prefixes come again."""
    rng = np.random.default_rng(seed)
    return trace_of(*("".join(rng.choice(list("abc"), size=rng.integers(1, 6))) for _ in range(60)))


def bench(ratio: float = 0.05) -> Bench:
    return Bench(COSTS, PAGE, ratio)


def hits(trace: Trace, pages: int, setup: Setup | None = None) -> list[int]:
    """Tokens hit by each request in a cache of `pages` pages, by least recent use if not told."""
    made = bench()
    _, outcome = made.replay(trace, setup or Setup("lru"), 1.0, pages * made.page_bytes)
    return list(outcome.matched)


def clairvoyant(trace: Trace) -> tuple[Setup, Clairvoyant]:
    oracle = Clairvoyant(look_ahead(trace, PAGE), PAGE)
    return Setup("clairvoyant", lambda: oracle), oracle


def foreseen(trace: Trace, pages: int) -> list[int]:
    """The same as `hits` for the policy that knows the future."""
    made = bench()
    setup, oracle = clairvoyant(trace)
    _, outcome = made.replay(trace, setup, 1.0, pages * made.page_bytes, oracle)
    return list(outcome.matched)


# ---- by hand


def test_hits_of_a_tiny_trace_are_those_counted_by_hand() -> None:
    trace = trace_of("ab", "cd", "ab", "ac", "e", "cd", "abx")
    # The last token of a prompt is always computed.
    assert hits(trace, 99) == [0, 0, 31, 16, 0, 31, 32]
    # Three pages: d pushes b out | a is found, b pushes d out | a again, its c pushes the other c out | e pushes b out |
    # c and d push out what follows a, then a | nothing is left of a.
    assert hits(trace, 3) == [0, 0, 16, 16, 0, 0, 0]
    # Four: a and b are found | a again, c pushes d out | e pushes the first c out | c and d push out what follows a |
    # a is still there.
    assert hits(trace, 4) == [0, 0, 31, 16, 0, 0, 16]


def test_who_knows_the_future_keeps_what_comes_again() -> None:
    trace = trace_of("a", "b", "c", "a", "b", "c", "a", "b", "c")
    assert sum(hits(trace, 2)) == 0
    # a stays; b and c take turns in the other place.
    # c must take a place: b's, which is asked for later than a | b takes c's? No: a's, asked for last | and so on.
    assert sum(foreseen(trace, 2)) == 3 * 15


def test_a_chat_goes_on_from_its_answer() -> None:
    first = Request(0.0, np.arange(20, dtype=np.uint32), np.arange(100, 110, dtype=np.uint32))
    again = np.concatenate([first.prompt, first.output, np.arange(200, 205, dtype=np.uint32)])
    trace = Trace("chat", lambda: iter([first, Request(1.0, again, NOTHING)]))
    assert hits(trace, 99) == [0, 30]
    future = look_ahead(trace, PAGE)
    assert list(future.starts) == [0, 2, 5]
    # Both pages of the first turn are used by the second, the partial one as the beginning of a longer one.
    assert list(future.following) == [2, 3, NEVER, NEVER, NEVER]


def test_the_bound_is_beladys_with_bypass() -> None:
    future = look_ahead(trace_of("a", "b", "c", "a", "b", "c"), PAGE)
    assert [most_hits(future, slots) for slots in (1, 2, 3)] == [1, 2, 3]
    assert most_hits(look_ahead(trace_of("a", "x", "a", "y", "a"), PAGE), 1) == 2


def most_hits_by_search(words: list[str], slots: int) -> int:
    """Try every choice of pages to keep after every request."""
    best: dict[frozenset[str], int] = {frozenset(): 0}
    for word in words:
        pages = {word[: at + 1] for at in range(len(word))}
        after: dict[frozenset[str], int] = {}
        for kept, count in best.items():
            there = kept | pages
            for size in range(min(slots, len(there)) + 1):
                for choice in itertools.combinations(sorted(there), size):
                    chosen = frozenset(choice)
                    after[chosen] = max(after.get(chosen, 0), count + len(kept & pages))
        best = after
    return max(best.values())


@pytest.mark.parametrize("seed", range(8))
def test_no_choice_of_pages_beats_the_bound(seed: int) -> None:
    rng = np.random.default_rng(seed)
    words = ["".join(rng.choice(list("ab"), size=rng.integers(1, 3))) for _ in range(8)]
    for slots in (1, 2, 3):
        assert most_hits(look_ahead(trace_of(*words), PAGE), slots) >= most_hits_by_search(words, slots)


# ---- what bounds what


@pytest.mark.parametrize("seed", range(12))
def test_nothing_exceeds_the_bound_and_who_knows_the_future_is_never_worse(seed: int) -> None:
    """By tokens in all. A page is stored even if it is never used again, so a page's worth a request is allowed for."""
    trace = random_trace(seed)
    setups = setups_of(["lru", "flops", "hiddens-first"], [0.25, 0.5], COSTS, 1.0)
    report = bench().measure(trace, setups, [0.1, 0.3, 0.6])
    bounds = {(bound.slots, bound.size): bound.hit_tokens for bound in report.bounds}
    best = {(row.size): row.hit_tokens for row in report.rows if row.policy == "clairvoyant"}
    for row in report.rows:
        assert row.hit_tokens <= bounds[row.slots, row.size] <= report.infinite.hit_tokens
        assert row.most_bytes <= row.limit_bytes
        if row.hidden_slots == row.slots:
            assert row.hit_tokens <= best[row.size], row.policy


@pytest.mark.parametrize("name", GENERATORS)
def test_every_policy_hits_the_same_without_a_limit(name: str) -> None:
    trace = made_trace(name, 60, 3)
    setups = setups_of(["lru", "flops", "hiddens-first"], [0.5], COSTS, 1.0)
    found = {setup.name: bench().replay(trace, setup, 0, UNLIMITED)[1].matched for setup in setups}
    future, oracle = clairvoyant(trace)
    found["clairvoyant"] = bench().replay(trace, future, 0, UNLIMITED, oracle)[1].matched
    assert len({tuple(matched) for matched in found.values()}) == 1
    assert sum(found["lru"]) > 0


def test_hiddens_first_counts_what_gone_hiddens_did() -> None:
    trace = made_trace("agents", 150, 1)
    report = bench().measure(trace, setups_of(["lru", "hiddens-first"], [0.25], COSTS, 1.0), [0.2])
    lru, fewer, _ = report.rows
    assert (lru.short_tails, lru.cut, lru.no_hiddens, lru.stripped) == (0, 0, 0, 0)
    assert fewer.slots > 1.5 * lru.slots
    assert fewer.hidden_slots < lru.slots
    assert fewer.stripped > 0
    assert fewer.short_tails + fewer.cut + fewer.no_hiddens > 0
    assert "hiddens-first 0.25" in render(report)


def test_costs_are_those_that_inspect_counts() -> None:
    assert COSTS.prefill_flops(0, 8192 + 64) == 64037962907648.0
    assert COSTS.hit_flops(8192, 8192 + 64, (410,) * 8) == 2320920739840.0
    assert (COSTS.kv_bytes, sum(COSTS.hidden_bytes), COSTS.state_bytes) == (32 * 1024, 35 * 1024, 49.5 * 2**20)


# ---- the command


def test_json_has_every_number_and_no_tensor_library_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    line = {"timestamp": 0, "input_length": 600, "output_length": 5}
    path.write_text("".join(json.dumps({**line, "hash_ids": [7, 8 + turn % 3]}) + "\n" for turn in range(12)))
    code = f"""
import sys
from tailreplay.cli import main
status = main(["bench", "eviction", "--trace", {str(path)!r}, "--sizes", "0.3", "1", "--json"])
assert not {{"torch", "transformers"}} & set(sys.modules)
sys.exit(status)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    answer = json.loads(done.stdout)
    assert answer["page_bytes"] == 64 * 67 * 1024
    [report] = answer["reports"]
    assert (report["trace"], report["requests"], report["prompt_tokens"]) == ("t.jsonl", 12, 7200)
    policies = ["lru", "flops", *(f"hiddens-first {share}" for share in (0.125, 0.25, 0.5)), "clairvoyant"]
    assert [row["policy"] for row in report["rows"]] == policies * 2
    assert report["infinite"]["hit_tokens"] == 2 * 512 + 9 * 599


def test_tables_are_printed_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "eviction", "--traces", "prompts", "--requests", "30", "--sizes", "0.2", "0.5"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "**prompts**: 30 requests",
        "| lru |",
        "| clairvoyant |",
        "| at most, as many pages |",
        "| 20% | 50% |",
    ):
        assert words in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--requests", "0"], "one request"),
        (["--seed", "-1"], "seed"),
        (["--sizes", "0"], "Sizes and shares"),
        (["--shares", "1.5"], "Sizes and shares"),
        (["--ratio", "2"], "replay ratio"),
        (["--page-size", "20"], "page size"),
        (["--alpha", "-1"], "alpha"),
        (["--trace", "x", "--traces", "mix"], "either"),
    ],
)
def test_bad_numbers_are_one_sentence(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "eviction", *arguments]) == 2
    shown = capsys.readouterr().err
    assert words in shown.splitlines()[-1]
