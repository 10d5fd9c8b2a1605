"""`tailreplay bench traffic`: what it computes of what servers did. The servers themselves are vLLM's tests' business."""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tailreplay.bench import traffic
from tailreplay.bench.numbers import during, percentile
from tailreplay.bench.overhead import overhead_rows, unique_prompts
from tailreplay.bench.stall import stall_rows
from tailreplay.bench.vllm_client import Client, Stream, Usage
from tailreplay.bench.vllm_server import VllmServer, without_connector
from tailreplay.cli import main
from tailreplay.engines.vllm.launch import server_command
from tailreplay.errors import TailReplayError

PIECES = 3


@pytest.mark.parametrize(
    ("count", "share", "expected"),
    [(1, 0.99, 1), (100, 0.99, 99), (101, 0.99, 100), (200, 0.99, 198), (4, 0.5, 2), (5, 0.5, 3), (10, 1.0, 10)],
)
def test_percentiles_are_values_that_were_seen(count: int, share: float, expected: int) -> None:
    assert percentile(list(range(count, 0, -1)), share) == expected


def test_gaps_belong_to_the_spans_that_they_touch() -> None:
    gaps = [(0.0, 1.0), (1.0, 3.0), (3.0, 4.0), (9.0, 9.5)]
    assert during(gaps, [(1.0, 2.0)]) == [2.0]
    assert during(gaps, [(0.5, 3.5)]) == [1.0, 2.0, 1.0]
    assert during(gaps, [(0.0, 0.1), (9.1, 9.2)]) == [1.0, 0.5]
    assert during(gaps, [(5.0, 6.0)]) == []


def test_the_ratio_is_the_median_of_pairs() -> None:
    plain, ours = overhead_rows([100.0, 200.0, 50.0], [99.0, 100.0, 51.0])
    assert (plain["tokens_per_s"], ours["tokens_per_s"]) == (100.0, 99.0)
    assert ours["ratio"] == 0.99
    assert (ours["ratio_min"], ours["ratio_max"]) == (0.5, 1.02)


def test_no_two_prompts_share_what_could_be_matched() -> None:
    prompts = [prompt for seed in range(30) for prompt in unique_prompts(seed, 20, 64)]
    assert len({tuple(prompt[:8]) for prompt in prompts}) == len(prompts)
    assert unique_prompts(1, 2, 30) == unique_prompts(1, 2, 30)


def usage(begin: float, end: float) -> Usage:
    return Usage(begin, end, 100, 1, 90)


def test_stalls_are_compared_with_quiet() -> None:
    gaps = [(0.01 * at, 0.01 * (at + 1)) for at in range(100)] + [(1.0, 1.03), (1.03, 1.04), (2.0, 2.5)]
    quiet, hit, cold = stall_rows(gaps, [(0.0, 1.0)], [usage(1.01, 1.035)], [usage(2.1, 2.4)])
    assert (quiet["gaps"], hit["gaps"], cold["gaps"]) == (100, 2, 1)
    assert quiet["p99_ms"] == pytest.approx(10)
    assert hit["ratio"] == pytest.approx(3)
    assert cold["ratio"] == pytest.approx(50)
    assert hit["ttft_ms"] == pytest.approx(25)
    assert stall_rows(gaps, [(0.0, 1.0)], [usage(1.01, 1.035)], []) == [quiet, hit]
    with pytest.raises(TailReplayError, match="use more --quiet"):
        stall_rows(gaps, [(7.0, 8.0)], [usage(1.01, 1.035)], [usage(2.1, 2.4)])


def test_tables_say_whether_targets_are_met() -> None:
    rows = [
        *overhead_rows([100.0], [96.0]),
        {"measure": "stall", "meanwhile": "quiet", "gaps": 9, "p50_ms": 1.0, "p99_ms": 2.0, "max_ms": 3.0},
        {
            "measure": "stall",
            "meanwhile": "hit",
            "gaps": 9,
            "p50_ms": 1.0,
            "p99_ms": 5.0,
            "max_ms": 5.0,
            "ratio": 2.5,
            "target": True,
            "ttft_ms": 70.0,
            "copy_ms": 1.0,
            "replay_ms": 40.0,
        },
    ]
    header, plain, ours = traffic.table("overhead", rows)
    assert len(header) == len(plain) == len(ours)
    assert ours == ["tailreplay", "96", "1", "0.960", "0.960", "0.960", ">= 0.97 missed"]
    assert plain[3:] == ["", "", "", ""]
    header, quiet, hit = traffic.table("stall", rows)
    assert len(header) == len(quiet) == len(hit)
    assert hit == ["hit", "9", "1.0", "5.0", "5.0", "2.50x", "<= 2x missed", "70", "1", "40"]
    assert quiet[5:] == ["", "", "", "", ""]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--hit-tokens", "-5"], "--hit-tokens must be at least 1, got -5"),
        (["--ratio", "0"], "--ratio must be above 0"),
        (["--cold", "-1"], "--cold must be at least 0, got -1"),
        (["--pause", "-1"], "--pause must be seconds"),
        (["--replay-per-step", "0"], "--replay-per-step must be at least 1"),
    ],
)
def test_numbers_that_make_no_sense_are_one_sentence(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "traffic", *given]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


def test_without_vllm_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise traffic.PackageNotFoundError(name)

    monkeypatch.setattr(traffic, "version", missing)
    assert main(["bench", "traffic"]) == 2
    assert capsys.readouterr().err.startswith("tailreplay: vLLM is not installed: pip install")


def test_quick_makes_everything_small(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[argparse.Namespace] = []

    def measure(arguments: argparse.Namespace, model: str) -> dict[str, Any]:
        seen.append(arguments)
        return {"rows": []}

    monkeypatch.setattr(traffic, "version", lambda name: "1")
    monkeypatch.setattr(traffic, "measure", measure)
    assert main(["bench", "traffic", "--quick", "--json"]) == 0
    assert (seen[0].rounds, seen[0].hit_tokens) == (1, 1500)


def test_the_plain_server_differs_in_the_connector_only() -> None:
    ours = server_command("m", "n", "127.0.0.1", 1, {"host_bytes": "1GiB"}, ["--max-model-len", "9"], cpu=True)
    plain = without_connector(ours)
    assert not any("tailreplay" in argument.lower() for argument in plain)
    assert len(plain) == len(ours) - 4
    assert [argument for argument in ours if argument in plain] == plain


# ---- a server that only looks like one


class Answers(BaseHTTPRequestHandler):
    """Answers completions, in pieces if asked, and has metrics."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["prompt"] == [1]:
            self.send_error(400)
            return
        self.send_response(200)
        self.end_headers()
        if body.get("stream"):
            for _ in range(PIECES):
                self.wfile.write(b"data: {}\n\n")
            self.wfile.write(b"data: [DONE]\n\n")
            return
        used = {"prompt_tokens": 2, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}}
        self.wfile.write(json.dumps({"usage": used}).encode())

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'vllm:tailreplay_hits_total{a="x"} 2.0\nvllm:tailreplay_hits_total{a="y"} 3.0\nother 9\n')

    def log_message(self, format: str, *args: Any) -> None:
        return


class Quiet(ThreadingHTTPServer):
    """A client that leaves in the middle is no error here."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        return


@pytest.fixture
def client() -> Iterator[Client]:
    with Quiet(("127.0.0.1", 0), Answers) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        yield Client(listener.server_address[1])
        listener.shutdown()


def test_requests_and_counters_are_read(client: Client) -> None:
    done = client.complete([5, 6], 3, mode="off")
    assert (done.prompt, done.generated, done.cached) == (2, 3, 1)
    assert done.begin < done.end
    assert client.counter("hits") == 5
    with pytest.raises(TailReplayError, match="refused a request"):
        client.complete([1], 3)


def test_a_stream_begins_again_until_it_is_stopped(client: Client) -> None:
    stream = Stream(client, [5, 6], 3)
    deadline = time.monotonic() + 30
    while len(stream.arrivals) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    stream.stop()
    assert [len(times) for times in stream.arrivals[:2]] == [PIECES, PIECES]
    assert len(stream.gaps()) >= 2 * (PIECES - 1)
    assert all(begin <= end for begin, end in stream.gaps())


def test_a_stream_that_breaks_says_so(client: Client) -> None:
    stream = Stream(client, [1], 3)
    with pytest.raises(TailReplayError, match="A stream broke: HTTP 400"):
        stream.stop()


def test_a_server_that_ends_at_once_is_one_sentence_and_its_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    command = ["sh", "-c", "echo this is why; exit 3"]
    monkeypatch.setattr("tailreplay.engines.vllm.launch.server_command", lambda *_: command)
    with (
        pytest.raises(TailReplayError, match="ended with status 3; the end of its log is above"),
        VllmServer("m", {}, []) as made,
    ):
        made.wait()
    assert "this is why" in capsys.readouterr().err
