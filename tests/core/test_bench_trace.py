"""`tailreplay bench trace`: traces made ready, the open loop, and the whole command against a fake server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailreplay.bench.endpoint import Answered, Endpoint
from tailreplay.bench.trace_load import Load, Outcome
from tailreplay.bench.trace_plan import arrivals, mapped, prepared, thinned
from tailreplay.bench.trace_report import OVER_TIME, common_tokens, ideal_tokens, lines, over_time, report
from tailreplay.bench.traces import GENERATORS, Request, made_trace
from tailreplay.cli import main
from tests.core.fake_completions import serving

MADE = list(GENERATORS)
FAST = ["--rate", "1000", "--max-prompt", "300", "--requests", "12"]


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, np.uint32)


# ---- traces made ready


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("scale", [1.0, 0.1])
def test_prompts_hold_the_answers_that_they_say(name: str, scale: float) -> None:
    requests = list(made_trace(name, 60, 3, scale))
    for index, request in enumerate(requests):
        for said in request.said:
            assert said.of < index
            answer = requests[said.of].output[said.begin : said.end]
            assert (request.prompt[said.at : said.at + len(answer)] == answer).all()
    assert any(request.said for request in requests) == (name != "prompts")


def test_thinking_is_missing_from_later_turns() -> None:
    requests = list(made_trace("thinking", 60, 3))
    for request in requests:
        for said in request.said:
            length = len(requests[said.of].output)
            assert (said.begin, said.end) == (round(0.7 * length), length)
            # What comes before the answer is its own request's prompt.
            assert common_tokens(request.prompt, requests[said.of].prompt) == said.at == len(requests[said.of].prompt)


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("most", [300, 3000])
def test_a_trace_fits_the_model(name: str, most: int) -> None:
    requests = prepared(name, 40, 1, most, 500, rate=4.0)
    assert len(requests) == 40
    longest = max(len(request.prompt) + len(request.output) for request in requests)
    assert most * 0.4 < longest <= most
    assert all(request.prompt.min() >= 16 and request.prompt.max() < 500 for request in requests)
    assert requests[-1].at - requests[0].at == pytest.approx(39 / 4.0)


def test_a_file_fits_the_model(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(
        json.dumps({"timestamp": 500 * at, "input_length": 900, "output_length": 100, "hash_ids": [1, at]}) + "\n"
        for at in range(5)
    ))  # fmt: skip
    whole, half = (prepared(str(path), 3, 0, most, 2000, rate=1.0) for most in (1000, 500))
    assert [len(request.prompt) for request in whole] == [900] * 3
    assert all(200 < len(request.prompt) < 450 and len(request.prompt) + len(request.output) <= 500 for request in half)
    for trace, shared in ((whole, 512), (half, 255)):
        assert all(abs(common_tokens(a.prompt, b.prompt) - shared) <= 1 for a, b in pairwise(trace))
    assert [request.at for request in whole] == [0.0, 1.0, 2.0]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20).map(sorted), st.floats(0.01, 1000))
def test_times_are_stretched_to_the_rate(times: list[float], rate: float) -> None:
    stretched = arrivals(times, rate)
    assert len(stretched) == len(times)
    assert stretched[0] == 0
    assert all(a <= b for a, b in pairwise(stretched))
    if times[-1] > times[0]:
        assert stretched[-1] == pytest.approx((len(times) - 1) / rate)


def test_drawn_times_have_the_rate() -> None:
    drawn = arrivals([0.0] * 4000, 5.0, seed=1)
    assert drawn[0] == 0
    assert drawn[-1] == pytest.approx(800, rel=0.1)
    assert drawn == arrivals([3.0] * 4000, 5.0, seed=1) != arrivals([3.0] * 4000, 5.0, seed=2)


@given(
    st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40), st.floats(0.02, 1.0)
)  # fmt: skip
def test_thinned_sequences_share_what_they_shared(a: list[int], b: list[int], scale: float) -> None:
    shared = common_tokens(tokens(*a), tokens(*b))
    thin_a, thin_b = thinned(tokens(*a), scale), thinned(tokens(*b), scale)
    assert len(thin_a) <= len(a)
    assert bool(len(thin_a)) == bool(a)
    assert common_tokens(thin_a, thin_b) >= min(int(shared * scale), len(thin_a), len(thin_b))


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20), st.integers(17, 200_000))
def test_tokens_are_mapped_into_the_vocabulary(ids: list[int], vocabulary: int) -> None:
    found = mapped(tokens(*ids), vocabulary)
    assert found.dtype == np.uint32
    assert all(16 <= token < vocabulary for token in found)


# ---- reports


def outcome(index: int, prompt: list[int], sent: float, ended: float, answer: list[int] | None, **more: Any) -> Outcome:
    made = Outcome(index, sent, sent, sent, tokens(*prompt), ended)
    if answer is None:
        return replace(made, error="late.")
    times = (sent, sent + 0.1, ended)
    return replace(made, answered=Answered(*times, len(prompt), len(answer), more.get("cached"), tuple(answer), ""))


def test_ideals_know_what_was_there_when_a_request_was_sent() -> None:
    found = ideal_tokens([
        outcome(0, [1, 2, 3], 0.0, 2.0, [4, 5, 6]),
        outcome(1, [1, 2, 3, 4, 5, 6, 7], 1.0, 5.0, [1]),  # while 0 runs: its prompt only
        outcome(2, [1, 2, 3, 4, 5, 8], 3.0, 5.0, [1]),  # of 1's prompt
        outcome(3, [1, 2, 3], 4.0, 5.0, None),  # one token is left to run
        outcome(4, [9, 9], 4.5, 5.0, [1]),
        outcome(5, [9, 9, 1], 6.0, 7.0, [1]),  # a single sampled token was never computed
    ])  # fmt: skip
    assert found == {0: 0, 1: 3, 2: 5, 3: 2, 4: 0, 5: 2}


def test_reports_count_over_time() -> None:
    measured = report(
        [
            outcome(0, [1, 2, 3, 4], 0.0, 0.5, [4, 5, 6], cached=0),
            outcome(1, [1, 2, 3, 5], 2.5, 3.0, [4, 5], cached=3),
            replace(outcome(2, [1, 2, 3, 5], 2.6, 9.0, None), arrival=1.0),
        ],
        bucket=1.0,
    )
    assert (measured["requests"], measured["errors"], measured["prompt_tokens"], measured["hit_tokens"]) == (3, 1, 8, 3)
    assert (measured["hit_share"], measured["ideal_share"]) == (3 / 8, 3 / 8)
    assert measured["ttft_p50_ms"] == pytest.approx(measured["ttft_p99_ms"]) == pytest.approx(100)
    assert measured["tpot_p50_ms"] == pytest.approx((400 / 2 + 400) / 2)
    assert measured["seconds"] == 9.0
    assert measured["tokens_in_per_s"] == pytest.approx(8 / 9)
    assert (measured["waited_for_answers"], measured["waited_for_a_turn"]) == (1, 0)
    assert measured["errors_by_message"] == {"late.": 1}
    assert [(each["from_s"], each["requests"], each["hit_share"]) for each in measured["over_time"]] == [
        (0.0, 1, 0.0), (1.0, 0, None), (2.0, 2, 0.75),
    ]  # fmt: skip
    assert all(len(line) == len(OVER_TIME) for line in over_time(measured))
    assert dict(lines(measured))["prompt tokens reused"] == "37.5%"


def test_reports_of_nothing() -> None:
    measured = report([], 1.0)
    assert measured["over_time"] == []
    assert dict(lines(measured))["prompt tokens reused"] == "not reported"


# ---- the open loop


def drive(requests: list[Request], concurrency: int | None = None, **options: Any) -> tuple[list[Outcome], Any]:
    outcomes: list[Outcome] = []

    async def load() -> None:
        async with Endpoint("fake", server.url) as endpoint:
            await Load(endpoint, requests, concurrency, outcomes).run()

    with serving(**options) as server:
        asyncio.run(load())
    return outcomes, server


@pytest.mark.parametrize("name", ["thinking", "agents", "mix"])
def test_later_prompts_hold_the_servers_own_answers(name: str) -> None:
    requests = prepared(name, 40, 1, 400, 2000, rate=1000.0)
    outcomes, _ = drive(requests)
    assert len(outcomes) == 40
    by_index = {each.index: each for each in outcomes}
    checked = 0
    for index, request in enumerate(requests):
        for said in request.said:
            earlier = by_index[said.of]
            assert earlier.answered is not None
            assert earlier.answered.tokens is not None
            assert earlier.ended <= by_index[index].sent
            answer = earlier.answered.tokens[said.begin : said.end]
            assert by_index[index].prompt[said.at : said.at + len(answer)].tolist() == list(answer)
            checked += 1
    assert checked > 10
    assert report(outcomes, 10.0)["hit_tokens"] > 0


def test_requests_are_due_on_arrival_or_when_what_they_go_on_from_has_ended() -> None:
    requests = prepared("mix", 30, 1, 400, 2000, rate=1000.0)
    outcomes, _ = drive(requests, concurrency=2)
    ends = {each.index: each.ended for each in outcomes}
    for each in outcomes:
        request = requests[each.index]
        assert each.due == max([request.at, *(ends[said.of] for said in request.said)]) <= each.sent


def test_one_at_a_time_has_all_that_an_ideal_cache_has() -> None:
    outcomes, _ = drive(prepared("chats", 30, 2, 400, 2000, rate=1000.0), concurrency=1)
    measured = report(outcomes, 10.0)
    assert measured["hit_share"] == measured["ideal_share"] > 0.2
    assert all(a.ended <= b.sent for a, b in pairwise(outcomes))
    assert measured["waited_for_a_turn"] > 0


def test_arrivals_do_not_wait_for_answers() -> None:
    outcomes: list[Outcome] = []
    requests = [Request(0.0, tokens(1, at), tokens(1)) for at in range(5)]

    async def load() -> None:
        async with Endpoint("fake", server.url) as endpoint:
            running = asyncio.create_task(Load(endpoint, requests, None, outcomes).run())
            while len(server.bodies) < 5:  # all have come, and none was answered
                assert not running.done()
                await asyncio.sleep(0.01)
            server.released.set()
            await running

    with serving(fails_after=0, failure="hang") as server:
        asyncio.run(load())
    assert [each.error for each in outcomes] == ["fake answered a request with nothing."] * 5


# ---- the whole command


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict[str, Any]:
    assert main(["bench", "trace", "--json", *FAST, *arguments]) == status
    out: dict[str, Any] = json.loads(capsys.readouterr().out)
    return out


def test_the_command_measures_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        out = run_json(capsys, "--url", server.url + "/v1", "--trace", "chats", "--concurrency", "1")
    assert (out["requests"], out["errors"], out["hit_share"]) == (12, 0, out["ideal_share"])
    assert {"ttft_p50_ms", "ttft_p95_ms", "ttft_p99_ms", "tpot_p50_ms", "tokens_in_per_s", "tokens_out_per_s"} <= set(
        out
    )
    assert sum(each["requests"] for each in out["over_time"]) == 12


def test_what_tailreplay_counts_is_in_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(metrics=True) as server:
        out = run_json(capsys, "--url", server.url, "--trace", "chats", "--concurrency", "1")
        assert main(["bench", "trace", "--url", server.url, *FAST]) == 0
    hits = server.counts["hits:provenance:approximate"]
    assert out["cache_lookups"] == 12
    assert 0 < out["cache_hits"] <= hits
    assert (out["cache_anchor_hits"], out["cache_anchors"], out["cache_bytes"]) == (2, 3, 4096)
    assert (out["exact_hit_share"], out["cache_complete_hits"]) == (0, 5)
    shown = capsys.readouterr().out
    assert "0.0% of them exact" in shown
    assert "3 saved states among them" in shown
    with serving() as server:
        assert run_json(capsys, "--url", server.url)["exact_hit_share"] is None


def test_failures_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(fails_after=7) as server:
        out = run_json(capsys, "--url", server.url)
    assert (out["requests"], out["errors"]) == (12, 5)
    assert out["errors_by_message"] == {"the server refused a request: HTTP 400, prompt is too long.": 5}


def test_nothing_but_failures_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(fails_after=0) as server:
        assert main(["bench", "trace", "--url", server.url, *FAST]) == 1
    assert "12 failed: the server refused a request: HTTP 400" in capsys.readouterr().out


def test_tables_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, picture = tmp_path / "a.html", tmp_path / "a.png"
    with serving(reports="") as server:
        files = ["--html", str(page), "--png", str(picture)]
        assert main(["bench", "trace", "--url", server.url, *FAST, *files]) == 0
    assert "not reported" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "data:image/png;base64," in page.read_text()


def test_an_interrupted_run_prints_what_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> None:
        while len(server.bodies) < 12:
            if server.released.wait(0.01):
                return
        os.kill(os.getpid(), signal.SIGINT)

    with serving(fails_after=11, failure="hang") as server:
        # A process that was started in the background ignores the signal.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        watcher = threading.Thread(target=interrupt)
        watcher.start()
        try:
            out = run_json(capsys, "--url", server.url, "--trace", "prompts", "--concurrency", "1", status=130)
        finally:
            watcher.join()
            signal.signal(signal.SIGINT, before)
    assert (out["requests"], out["errors"]) == (11, 0)


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        assert main(["bench", "trace", "--url", url]) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith(f"tailreplay: No server answers at {url}")
    assert shown.err.count("\n") == 1
    assert shown.out == ""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--requests", "0"], "--requests must be at least 1, got 0"),
        (["--concurrency", "0"], "--concurrency must be at least 1, got 0"),
        (["--rate", "0"], "--rate must be a number above 0, got 0"),
        (["--bucket", "-1"], "--bucket must be a number above 0, got -1"),
        (["--max-prompt", "10"], "--max-prompt must be at least 64, got 10"),
        (["--vocabulary", "3"], "--vocabulary must be more than 16, got 3"),
        (["--no-anchors"], "--no-anchors goes with --start tailreplay only"),
        (["--trace", "/no/such/file"], "or a file in Mooncake's format, got '/no/such/file'"),
    ],
)
def test_options_that_make_no_sense(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "trace", "--url", "http://127.0.0.1:1", *given]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


def test_an_address_without_a_port(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "trace", "--url", "http://localhost:99999"]) == 2
    assert "There can be no server at 'http://localhost:99999'" in capsys.readouterr().err


def test_a_url_without_a_scheme(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "trace", "--url", "localhost:1"]) == 2
    assert "--url must be http://…, got 'localhost:1'" in capsys.readouterr().err
