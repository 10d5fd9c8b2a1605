"""`tailreplay bench peers`: patterns, ideals, and the whole command against servers that only look like one."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailreplay.bench import peers_run, started, traffic
from tailreplay.bench.endpoint import Endpoint, EndpointError
from tailreplay.bench.ideals import History, common_prefix
from tailreplay.bench.patterns import PATTERNS, Answer, Draw, Waves, longest, resolve
from tailreplay.bench.peers_table import HEADINGS, rows_of, table
from tailreplay.bench.trace_report import common_tokens
from tailreplay.bench.wording import word
from tailreplay.cli import main
from tailreplay.errors import TailReplayError
from tests.core.fake_completions import MODEL, FakeServer, serving

SMALL = ["--scale", "0.05", "--max-tokens", "12"]


# ---- ideals

few = st.lists(st.integers(0, 2), max_size=8)


def naive_shared(a: list[int], b: list[int]) -> int:
    return max(length for length in range(min(len(a), len(b)) + 1) if a[:length] == b[:length])


@given(few, few)
def test_common_prefixes(a: list[int], b: list[int]) -> None:
    import numpy as np

    assert common_prefix(a, b) == naive_shared(a, b)
    assert common_tokens(np.array(a, np.uint32), np.array(b, np.uint32)) == naive_shared(a, b)


@given(st.lists(st.tuples(few.filter(bool), few), max_size=6), few.filter(bool))
def test_an_ideal_is_the_longest_prefix_computed_before(
    before: list[tuple[list[int], list[int]]], prompt: list[int]
) -> None:
    history = History()
    computed: list[list[int]] = []
    for sent, answer in before:
        assert history.ideal(sent) == naive_ideal(computed, sent)
        history.add(sent, answer)
        computed += [sent + answer[:length] for length in range(max(len(answer), 1))]
    assert history.ideal(prompt) == naive_ideal(computed, prompt)


def naive_ideal(computed: list[list[int]], prompt: list[int]) -> int:
    lengths = [length for length in range(len(prompt)) if any(known[:length] == prompt[:length] for known in computed)]
    return max(lengths, default=0)


# ---- patterns


def sent(waves: Waves, answer: int) -> list[list[int]]:
    """The prompts, where the server answers with `answer` tokens of its own."""
    prompts: list[list[int]] = []
    answers: list[list[int]] = []
    for wave in waves:
        prompts += [resolve(prompt, answers) for prompt in wave]
        answers += [
            [10_000 + 100 * len(prompts) + 40 * at + place for place in range(answer)] for at in range(len(wave))
        ]
    return prompts


def ideals(waves: Waves, answer: int = 20) -> list[int]:
    history, found, answers = History(), [], []
    for wave in waves:
        prompts = [resolve(prompt, answers) for prompt in wave]
        for prompt in prompts:
            found.append(history.ideal(prompt))
            history.add(prompt)
        for prompt in prompts:
            answers.append([10_000 + 50 * len(answers) + place for place in range(answer)])
            history.add(prompt, answers[-1])
    return found


@given(st.sampled_from(list(PATTERNS)), st.integers(0, 5), st.integers(0, 40), st.sampled_from([0.02, 0.1, 1.0]))
@settings(max_examples=40, deadline=None)
def test_a_pattern_is_the_same_for_the_same_seed(name: str, seed: int, place: int, scale: float) -> None:
    waves = PATTERNS[name](Draw(seed, place, scale))
    assert waves == PATTERNS[name](Draw(seed, place, scale))
    assert waves != PATTERNS[name](Draw(seed + 1, place, scale))
    prompts = sent(waves, 20)
    assert all(prompts)
    assert max(map(len, prompts)) + 20 == longest(waves, 20)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("shared-prefix", [0, 1500, 1500, 1500]),
        ("same-prompt", [0, 3999, 3999]),
        ("short-system", [0, 48, 48, 48, 48, 48]),
        ("tiny-system", [0, 16, 16, 16, 16, 16]),
        # Each turn: the one before, with its answer but for the last token that was sampled.
        ("chat", [0, 1019, 1159, 1299, 1439, 1579]),
        # Each turn: the one before, and the three tokens before the thinking.
        ("thinking", [0, 1003, 1135, 1267, 1399, 1531]),
        ("regenerate", [0, 1399, 1399, 899]),
        ("shorter", [0, 1999, 1999, 1999]),
        ("agents", [0, *[3000] * 5, *[3219] * 5, *[3339] * 5]),
        ("burst", [0, 2000, 2000, 2000, 2000]),
        ("unique", [0] * 6),
    ],
)
def test_what_an_ideal_cache_has_of_a_pattern(name: str, expected: list[int]) -> None:
    assert ideals(PATTERNS[name](Draw(3, 2))) == expected


def test_branches_leave_the_middle_where_they_were_cut() -> None:
    waves = PATTERNS["middle"](Draw(3, 2))
    assert ideals(waves) == [0, *(len(prompt[0]) for [prompt] in waves[1:] if not isinstance(prompt[0], Answer))]


def test_patterns_share_nothing_with_each_other() -> None:
    starts = [
        {prompt[0] for prompt in sent(PATTERNS[name](Draw(0, repeat * len(PATTERNS) + at, 0.1)), 20)}
        for repeat in range(3)
        for at, name in enumerate(PATTERNS)
    ]
    assert sum(map(len, starts)) == len(set().union(*starts))


def test_each_token_has_its_own_word() -> None:
    assert len({word(token) for token in range(2000)}) == 2000


# ---- rows


def record(
    server: str, cached: list[int | None], lookups: dict[str, int] | None = None, repeat: int = 0
) -> dict[str, Any]:
    requests = [
        {"prompt": 10, "generated": 2, "ideal": 8 if at else 0, "cached": each, "ttft_ms": 100.0 + at, "report": None}
        for at, each in enumerate(cached)
    ]
    return {"server": server, "pattern": "p", "repeat": repeat, "requests": requests, "lookups": lookups, "note": ""}


def test_rows_sum_repeats_and_tell_silence_from_nothing() -> None:
    ours = {"hits:exact": 1, "hits:approximate": 1, "misses:unseen_prefix": 1}
    a, b, c = rows_of([
        record("a", [0, 8, 4], ours), record("a", [0, 8, 8], ours, 1), record("b", [None, None]), record("c", [None, 6]),
    ])  # fmt: skip
    assert (a["requests"], a["ideal"], a["reused"], a["ratio"]) == (6, 32, 28, 28 / 32)
    assert (a["exact"], a["approximate"], a["misses"]) == (2, 2, {"unseen_prefix": 2})
    assert (a["ttft_p50_ms"], a["ttft_p95_ms"], a["cold_p50_ms"]) == (101.5, 102.0, 100.0)
    assert (b["reused"], b["ratio"], b["exact"]) == (None, None, None)
    assert (c["reused"], c["ratio"]) == (6, 0.75)
    lines = table([a, b, c])
    assert {len(line) for line in lines} == {len(HEADINGS)}
    assert [line[0] for line in lines] == ["p", "", ""]
    assert [line[5] for line in lines] == ["28", "not reported", "6"]


# ---- the whole command


def url(server: FakeServer, name: str = "fake") -> str:
    return f"--url={name}={server.url}"


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict[str, Any]:
    assert main(["bench", "peers", "--json", *SMALL, *arguments]) == status
    out: dict[str, Any] = json.loads(capsys.readouterr().out)
    return out


def test_a_perfect_cache_has_all_of_every_pattern(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as perfect, serving(block=16) as blocks:
        out = run_json(capsys, url(perfect), url(blocks, "blocks"), "--repeats", "2")
    assert [row["pattern"] for row in out["rows"]] == [name for name in PATTERNS for _ in range(2)]
    by_server = {name: [row for row in out["rows"] if row["server"] == name] for name in ("fake", "blocks")}
    assert all(row["reused"] == row["ideal"] for row in by_server["fake"])
    assert all(row["reused"] <= row["ideal"] for row in by_server["blocks"])
    assert sum(row["reused"] < row["ideal"] for row in by_server["blocks"]) > 8
    assert all(row["ideal"] for row in by_server["fake"] if row["pattern"] != "unique")
    assert out["notes"] == {}


def test_what_is_sent(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with serving() as server:
        run_json(capsys, url(server), "--patterns", "thinking")
    assert set(server.keys) == {"Bearer secret"}
    assert {body["model"] for body in server.bodies} == {MODEL}
    assert {body["max_tokens"] for body in server.bodies} == {12}
    chat = [body["prompt"] for body in server.bodies[3:]]
    answers = {tuple(prompt): server.known[at + 3][len(prompt) :] for at, prompt in enumerate(chat)}
    first = answers[tuple(chat[0])]
    # The answer's beginning and end, without its thinking; its last token was never computed.
    assert chat[1][len(chat[0]) :][:11] == first[:3] + first[3:11]
    assert len(chat[1]) == len(chat[0]) + 3 + 9 + 6


def test_hits_are_counted_by_what_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(metrics=True) as server:
        out = run_json(capsys, url(server), "--patterns", "regenerate", "unique")
    again, unique = out["rows"]
    assert (again["exact"], again["approximate"], again["misses"]) == (0, 3, {"unseen_prefix": 1})
    assert (unique["exact"], unique["approximate"], unique["misses"]) == (0, 0, {"unseen_prefix": 6})


def test_a_server_that_tells_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(reports="", tells_ids=False) as server:
        assert main(["bench", "peers", *SMALL, url(server), "--patterns", "chat"]) == 0
    shown = capsys.readouterr().out
    assert "not reported" in shown
    assert "answers' token ids are not told" in shown


def test_an_answer_without_ids_is_not_expected_to_be_reused(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(reports="llama.cpp", tells_ids=False) as server:
        (row,) = run_json(capsys, url(server), "--patterns", "chat")["rows"]
    assert row["reused"] == row["ideal"] > 0


@pytest.mark.parametrize("tokenizes", [True, False])
def test_text_prompts(tokenizes: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(tokenizes=tokenizes) as server:
        out = run_json(capsys, url(server), "--text", "--patterns", "chat", "thinking", "regenerate", "unique")
    assert all(isinstance(body["prompt"], str) for body in server.bodies)
    for row in out["rows"]:
        # Estimates from words do not know of the token before the text.
        assert abs(row["reused"] - row["ideal"]) <= (0 if tokenizes else row["requests"])
    assert ("estimated from words" in out["notes"]["fake"]) == (not tokenizes)


# ---- what goes wrong


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("refuse", "fake refused a request: HTTP 400, prompt is too long."),
        ("break", "fake broke off a request: peer closed connection"),
        ("error", "fake broke off a request: "),
        ("garbage", "not JSON"),
        ("malformed", 'fake sent a malformed piece of an answer: {"choices": [null]}'),
        ("empty", "fake answered a request with nothing"),
    ],
)
def test_a_failure_is_one_sentence_and_keeps_the_results(
    failure: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved = tmp_path / "saved.jsonl"
    more = ["--patterns", "regenerate", "unique", "--save", str(saved)]
    with serving() as good, serving(fails_after=3 + 4 + 1, failure=failure) as bad:
        assert main(["bench", "peers", "--json", *SMALL, url(bad), url(good, "good"), *more]) == 1
    shown = capsys.readouterr()
    (line,) = [line for line in shown.err.splitlines() if line.startswith("tailreplay:")]
    assert message in line
    cells = [(row["pattern"], row["server"]) for row in json.loads(shown.out)["rows"]]
    assert cells == [("regenerate", "fake"), ("regenerate", "good"), ("unique", "good")]
    kept = [json.loads(line) for line in saved.read_text().splitlines()]
    assert [(each["pattern"], each["server"]) for each in kept] == [
        ("regenerate", "fake"), ("regenerate", "good"), ("unique", "good"),
    ]  # fmt: skip


def test_a_server_that_hangs_is_given_up() -> None:
    async def ask() -> None:
        async with Endpoint("fake", server.url, timeout=0.1) as endpoint:
            await endpoint.complete([1, 2], 3)

    with (
        serving(fails_after=0, failure="hang") as server,
        pytest.raises(EndpointError, match=r"fake did not answer a request in 0\.1 seconds"),
    ):
        asyncio.run(ask())


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        assert main(["bench", "peers", f"--url=gone=http://127.0.0.1:{port}"]) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith(f"tailreplay: gone: No server answers at http://127.0.0.1:{port}")
    assert shown.err.count("\n") == 1
    assert shown.out == ""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--max-tokens", "0"], "--max-tokens must be at least 1, got 0"),
        (["--scale", "0"], "--scale must be a number above 0"),
        (["--scale", "nan"], "--scale must be a number above 0"),
        (["--servers"], "There is nothing to measure"),
        (["--url", "http://x"], "--url must be NAME=http://"),
        (["--url", "own=http://x"], "the name 'own' is taken"),
        (["--url", "a=http://x:port"], "There can be no server at 'http://x:port'"),
        (["--url", "a=http://"], "There can be no server at 'http://'"),
        (["--url", "a=http://x", "--save", "/dev/null/f"], "'/dev/null/f' cannot be written"),
        (["--url", "a=http://x", "--png", "/dev/null/f"], "'/dev/null/f' cannot be written"),
    ],
)
def test_options_that_make_no_sense(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "peers", *given]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


def test_prompts_longer_than_the_model_are_said_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "version", lambda name: "1")
    assert main(["bench", "peers", "--scale", "4", "--patterns", "same-prompt"]) == 2
    assert "16,033 tokens, the model takes 8,192: use a smaller --scale" in capsys.readouterr().err


def test_servers_are_started_one_after_another(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    up: list[str] = []

    @contextmanager
    def fake_start(arguments: Any, kind: str, model: str, longest: int) -> Any:
        assert not up
        if kind == "own":
            raise TailReplayError("The vLLM server ended with status 1.")
        up.append(kind)
        with serving(block=1 if kind == "tailreplay" else 10**9) as server:
            yield Endpoint(kind, server.url, MODEL, tells=True)
        up.remove(kind)

    monkeypatch.setattr(traffic, "version", lambda name: "1")
    monkeypatch.setattr(started, "started", fake_start)
    out = run_json(capsys, "--patterns", "regenerate", status=1)
    assert [(row["server"], row["ratio"]) for row in out["rows"]] == [("none", 0.0), ("tailreplay", 1.0)]


def test_an_interrupted_run_prints_what_it_has(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    ask = peers_run.ask

    async def interrupted(*arguments: Any) -> Any:
        asked.append(arguments)
        if len(asked) > 2:  # the warm-up and one pattern
            raise KeyboardInterrupt
        return await ask(*arguments)

    monkeypatch.setattr(peers_run, "ask", interrupted)
    with serving() as server:
        out = run_json(capsys, url(server), "--patterns", "chat", "unique", status=130)
    assert [row["pattern"] for row in out["rows"]] == ["chat"]


def test_report_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, picture = tmp_path / "a.html", tmp_path / "a.png"
    files = ["--html", str(page), "--png", str(picture)]
    with serving() as server:
        assert main(["bench", "peers", *SMALL, url(server, "<one>"), "--patterns", "chat", "unique", *files]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "&lt;one&gt;" in text
    assert "<one>" not in text
    assert "data:image/png;base64," in text
    assert "chat" in capsys.readouterr().out


def test_a_restarted_server_is_asked_again(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    disks: list[str] = []

    with serving() as server:

        @contextmanager
        def fake_start(arguments: Any, kind: str, model: str, longest: int, settings: dict[str, Any]) -> Any:
            disks.extend(settings["tiers"])
            yield Endpoint(kind, server.url, MODEL)

        monkeypatch.setattr(traffic, "version", lambda name: "1")
        monkeypatch.setattr(started, "started", fake_start)
        out = run_json(capsys, "--servers", "restarted", "--patterns", "unique")
    (row,) = out["rows"]
    assert len(set(disks)) == 1
    assert len(disks) == 2
    # Everything was asked before; one token of each prompt is left to run.
    assert row["reused"] == row["ideal"] == row["prompt"] - row["requests"]
