"""A vLLM server with the connector, over HTTP, with the unmodified client."""

from __future__ import annotations

import concurrent.futures
import random
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from transformers import AutoTokenizer

from tests.server.caller import common_prefix
from tests.server.texts import KEYS, branch, document, ids_of, question
from tests.vllm_live.conftest import BUNDLED, Server

MIN_MATCH = 16


@dataclass
class Answer:
    """What a request brought back."""

    text: str
    tokens: list[int]
    cached: int
    report: dict[str, Any] | None


class Caller:
    """Sends requests of token ids under one salt and checks what was reused of each."""

    def __init__(self, server: Server, salt: str) -> None:
        # A connection each: the server closes idle ones, which a client that keeps them may notice too late.
        http = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0), timeout=300)
        self.client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, http_client=http)
        self.salt = salt
        self.stored: list[list[int]] = []

    def send(self, ids: list[int], max_tokens: int = 1, **options: Any) -> Answer:
        """Complete `ids` greedily, without any check."""
        extra = {"cache_salt": self.salt, "return_token_ids": True, "ignore_eos": True}
        if options:
            extra["tailreplay"] = options
        response = self.client.completions.create(
            model="bundled", prompt=ids, max_tokens=max_tokens, temperature=0, extra_body=extra
        )
        params = (response.model_extra or {}).get("kv_transfer_params") or {}
        choice = response.choices[0]
        details = response.usage.prompt_tokens_details
        return Answer(choice.text, choice.token_ids, details.cached_tokens if details else 0, params.get("tailreplay"))

    def ask(self, ids: list[int], max_tokens: int = 1, **options: Any) -> Answer:
        """Complete `ids`, and check that the longest common prefix with anything before is reused to the token."""
        answer = self.send(ids, max_tokens, **options)
        longest = max((common_prefix(ids, stored) for stored in self.stored), default=0)
        expected = min(longest, len(ids) - 1)
        assert answer.cached == (expected if expected >= MIN_MATCH else 0)
        assert answer.report is not None
        assert answer.report["matched"] == answer.cached
        self.stored.append([*ids, *answer.tokens[:-1]])
        return answer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(BUNDLED)


@pytest.fixture
def caller(server: Server, request: pytest.FixtureRequest) -> Caller:
    return Caller(server, request.node.name)


def test_shared_1500_of_2200(caller: Caller, tokenizer: Any) -> None:
    first = ids_of(tokenizer, 1, 2200)
    caller.ask(first)
    assert caller.ask(branch(first, 1500, ids_of(tokenizer, 2, 2200))).cached == 1500


def test_identical_prompt_thrice(caller: Caller, tokenizer: Any) -> None:
    ids = ids_of(tokenizer, 3, 1000)
    assert [caller.ask(ids).cached for _ in range(3)] == [0, 999, 999]


def test_prompt_shorter_than_a_block(caller: Caller, tokenizer: Any) -> None:
    system = ids_of(tokenizer, 4, 40)
    caller.ask([*system, *ids_of(tokenizer, 5, 30)])
    assert caller.ask(branch([*system, *ids_of(tokenizer, 5, 30)], 40, ids_of(tokenizer, 6, 100))).cached == 40


def test_growing_chat(caller: Caller, tokenizer: Any) -> None:
    ids = ids_of(tokenizer, 7, 300)
    for turn in range(5):
        answer = caller.ask(ids, max_tokens=30)
        assert (answer.cached > 0) == (turn > 0)
        ids = [*ids, *answer.tokens, *ids_of(tokenizer, 70 + turn, 60)]


def test_thinking_removed(caller: Caller, tokenizer: Any) -> None:
    ids = ids_of(tokenizer, 8, 400)
    answer = caller.ask(ids, max_tokens=80)
    assert caller.ask([*ids, *answer.tokens[60:], *ids_of(tokenizer, 9, 50)]).cached >= 400


def test_regenerate_and_strict_prefix(caller: Caller, tokenizer: Any) -> None:
    ids = ids_of(tokenizer, 10, 900)
    caller.ask(ids, max_tokens=20)
    assert caller.ask(ids, max_tokens=20).cached == 899
    assert caller.ask(ids[:500]).cached == 499
    assert caller.ask(ids[:256]).cached == 255


def test_nonce_at_token_40(caller: Caller, tokenizer: Any) -> None:
    ids = ids_of(tokenizer, 11, 800)
    caller.ask(ids)
    assert caller.ask(branch(ids, 40, ids_of(tokenizer, 12, 800))).cached == 40


@pytest.mark.parametrize("at", [17, 255, 256, 257, 383, 511, 513, 1023])
def test_branch_at_odd_offsets(caller: Caller, tokenizer: Any, at: int) -> None:
    ids = ids_of(tokenizer, 13, 1100)
    caller.ask(ids)
    assert caller.ask(branch(ids, at, ids_of(tokenizer, 14, 1100))).cached == at


def test_salts_and_no_salt_never_share(caller: Caller, server: Server, tokenizer: Any) -> None:
    ids = ids_of(tokenizer, 15, 500)
    caller.ask(ids)
    other = Caller(server, "another salt")
    assert other.ask(ids).cached == 0
    response = caller.client.completions.create(model="bundled", prompt=ids, max_tokens=1)
    assert (response.usage.prompt_tokens_details.cached_tokens or 0) == 0


def test_answers_stay_right_at_concurrency_8(caller: Caller, tokenizer: Any) -> None:
    """Documents with six questions each, all at once: reused, and the model still finds the numbers."""
    jobs = []
    for seed in range(4):
        text, numbers = document(seed, 80)
        for key in KEYS:
            ids = tokenizer.encode(f"{text}\n{question(key)}\nAnswer: ")
            jobs.append((ids, numbers[key]))
    random.Random(0).shuffle(jobs)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda job: caller.send(job[0], max_tokens=6), jobs))
    right = sum(answer.text.startswith(number) for answer, (_, number) in zip(answers, jobs, strict=True))
    assert right >= len(jobs) - 2  # the model itself misses one now and then
    computed = sum(len(ids) - answer.cached for answer, (ids, _) in zip(answers, jobs, strict=True))
    documents = sum(len(jobs[0][0]) for _ in range(4))
    assert computed < 1.6 * documents


def test_a_burst_computes_its_prefix_once(caller: Caller, tokenizer: Any) -> None:
    prefix = ids_of(tokenizer, 16, 2000)
    prompts = [
        branch([*prefix, *ids_of(tokenizer, 17, 100)], 2000, [3 + i, *ids_of(tokenizer, 20 + i, 99)]) for i in range(6)
    ]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda ids: caller.send(ids, max_tokens=4), prompts))
    computed = sum(len(ids) - answer.cached for answer, ids in zip(answers, prompts, strict=True))
    assert computed - 6 * 100 <= 1.5 * 2000


@pytest.mark.parametrize(
    "wrong",
    [
        {"tailreplay": {"mode": "sometimes"}},
        {"tailreplay": {"ratio": 0}},
        {"tailreplay": {"ratio": "abc"}},
        {"tailreplay": []},
        {"kv_transfer_params": {"tailreplay": {"depth": 1}}},
        {"kv_transfer_params": 5},
    ],
)
def test_nonsense_is_answered_with_400(caller: Caller, wrong: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError):
        caller.client.completions.create(model="bundled", prompt="hello there", max_tokens=1, extra_body=wrong)
    assert caller.client.completions.create(model="bundled", prompt="hello there", max_tokens=1).choices


def test_streams_tell_cached_tokens_and_the_log_the_rest(caller: Caller, server: Server, tokenizer: Any) -> None:
    ids = ids_of(tokenizer, 30, 600)
    caller.ask(ids)
    chunks = list(
        caller.client.completions.create(
            model="bundled",
            prompt=ids,
            max_tokens=3,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"cache_salt": caller.salt},
        )
    )
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 599
    assert "'matched': 599" in server.log.read_text()


def test_chats_work(caller: Caller) -> None:
    text, numbers = document(9, 40)
    for turn in range(2):
        response = caller.client.chat.completions.create(
            model="bundled",
            messages=[{"role": "user", "content": f"{text}\n{question('stone')}"}],
            max_tokens=6,
            temperature=0,
            extra_body={"cache_salt": caller.salt},
        )
        assert response.choices[0].message.content.startswith(numbers["stone"])
        assert bool(response.usage.prompt_tokens_details.cached_tokens) == bool(turn)


def test_metrics_count_what_happened(caller: Caller, server: Server, tokenizer: Any) -> None:
    def total(name: str) -> float:
        return sum(
            value for series, value in server.metrics().items() if series.startswith(f"vllm:tailreplay_{name}_total")
        )

    before = {name: total(name) for name in ("prompt_tokens", "hit_tokens", "replayed_tokens", "misses", "hits")}
    ids = ids_of(tokenizer, 31, 400)
    caller.ask(ids)
    caller.ask(ids)
    caller.send([5, 6], mode="off")  # a last step, after which everything is counted
    gained = {name: total(name) - value for name, value in before.items()}
    assert gained["hit_tokens"] == 399
    assert gained["replayed_tokens"] == 64
    assert gained["hits"] == 1
    assert gained["prompt_tokens"] >= 800
    assert any(series.startswith("vllm:tailreplay_cache_bytes") for series in server.metrics())


def pattern(caller: Caller, tokenizer: Any, seed: int) -> None:
    """The patterns above, one after another, under one salt."""
    base = 1000 + 20 * seed
    first = ids_of(tokenizer, base, 1300)
    caller.ask(first)
    assert caller.ask(branch(first, 1001, ids_of(tokenizer, base + 1, 1300))).cached == 1001
    caller.ask(first)
    caller.ask(branch(first, 40, ids_of(tokenizer, base + 2, 300)))
    caller.ask(first[:256])
    chat = ids_of(tokenizer, base + 3, 200)
    for turn in range(3):
        answer = caller.ask(chat, max_tokens=20)
        chat = [*chat, *answer.tokens[10 * (turn == 1) :], *ids_of(tokenizer, base + 4 + turn, 40)]
    for at in (17, 256, 257):
        caller.ask(branch(first, at, ids_of(tokenizer, base + 8 + at % 7, 500)))


def test_patterns_hold_to_the_token_at_concurrency_8(server: Server, tokenizer: Any) -> None:
    """Eight tenants at once, each with every pattern: none disturbs another's reuse by a token."""
    callers = [Caller(server, f"tenant {number}") for number in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda job: pattern(job[1], tokenizer, job[0]), enumerate(callers)))
