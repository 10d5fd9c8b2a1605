"""Every pattern of traffic that users of checkpoint-based prefix caches suffer from, over HTTP.

`Caller` asserts after every request that `cached_tokens` is the longest common prefix with what came before; the
tests here add what that length must be, in numbers.
"""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.server.caller import Caller
from tests.server.texts import KEYS, branch, document, filler, ids_of, question


def test_shares_1500_of_2200_tokens(caller: Caller, tokenizer: Any) -> None:
    first, other = ids_of(tokenizer, 1, 2200), ids_of(tokenizer, 2, 700)
    assert caller.complete(first).report["miss_reason"] == "unseen_prefix"
    answer = caller.complete(branch(first, 1500, other))
    assert answer.cached == 1500
    assert answer.report["replayed"] == 75
    assert answer.report["stop"] == "diverged"


def test_identical_prompt_hits_from_the_second_time_on(caller: Caller, tokenizer: Any) -> None:
    ids = ids_of(tokenizer, 3, 1111)
    assert [caller.complete(ids).cached for _ in range(3)] == [0, 1110, 1110]


def test_system_prompt_shorter_than_a_page(caller: Caller) -> None:
    system = {"role": "system", "content": filler(4, 3)}
    length = len(caller.tokenizer.encode(system["content"]))
    assert 32 <= length < 64
    cached = [caller.chat([system, {"role": "user", "content": f"{n}? Say it."}]).cached for n in (1, 2, 3)]
    assert cached[0] == 0
    assert all(at >= length for at in cached[1:])


def test_growing_chat_computes_only_what_is_new(caller: Caller) -> None:
    text, numbers = document(5)
    messages = [
        {"role": "system", "content": "Read the text."},
        {"role": "user", "content": f"{text}\n{question('apple')}"},
    ]
    known = right = 0
    for turn, (key, number) in enumerate(numbers.items()):
        if turn:
            messages.append({"role": "user", "content": question(key)})
        answer = caller.chat(messages)
        right += answer.text == number
        assert answer.cached == known
        # Up to the end of this answer; the newline after it is the token that stopped it, which was never computed.
        known = answer.prompt_tokens + len(caller.tokenizer.encode(answer.text))
        messages.append({"role": "assistant", "content": answer.text})
    assert right >= 5  # the model is small; every turn adds a replay behind the next


def test_thinking_removed_from_history(caller: Caller) -> None:
    text, numbers = document(6)
    ask = [{"role": "user", "content": f"{text}\n{question('stone')}"}]
    thinking = f"<think>{filler(7, 12)}</think>{numbers['stone']}"
    then = [{"role": "user", "content": question("silver")}]
    first = caller.chat(ask)
    with_thoughts = caller.chat([*ask, {"role": "assistant", "content": thinking}, *then])
    assert with_thoughts.cached >= first.prompt_tokens
    without = caller.chat([*ask, {"role": "assistant", "content": numbers["stone"]}, *then])
    assert without.cached >= first.prompt_tokens
    assert without.text == numbers["silver"]


def test_regenerate(caller: Caller) -> None:
    text, numbers = document(8)
    messages = [{"role": "user", "content": f"{text}\n{question('window')}"}]
    first, again = caller.chat(messages), caller.chat(messages)
    assert again.cached == first.prompt_tokens - 1
    assert first.text == again.text == numbers["window"]


@pytest.mark.parametrize("length", [700, 704, 705])
def test_shorter_prompt_leaves_one_token_to_run(caller: Caller, tokenizer: Any, length: int) -> None:
    ids = ids_of(tokenizer, 9, 1500)
    caller.complete(ids)
    answer = caller.complete(ids[:length])
    assert answer.cached == length - 1
    assert answer.report["stop"] == "end"


def test_nonce_early_in_the_prompt(caller: Caller, tokenizer: Any) -> None:
    ids, other = ids_of(tokenizer, 10, 900), ids_of(tokenizer, 11, 20)
    caller.complete(ids)
    for nonce in range(3):
        changed = [*ids[:40], *other[nonce * 3 : nonce * 3 + 3], *ids[43:]]
        assert caller.complete(changed).cached >= 40
    assert caller.complete(ids).cached == 899


@pytest.mark.parametrize("at", [33, 63, 64, 65, 127, 129, 517, 1001, 1023])
def test_branch_anywhere(caller: Caller, tokenizer: Any, at: int) -> None:
    first, second, third = (ids_of(tokenizer, seed, 1100) for seed in (12, 13, 14))
    caller.complete(first)
    left = branch(first, at, second)
    assert caller.complete(left).cached == at
    # A branch of the branch, one token further, and both again.
    deeper = branch(left, at + 1, third)
    assert caller.complete(deeper).cached == at + 1
    for ids in (first, left, deeper):
        assert caller.complete(ids).cached == 1099


def test_match_below_the_minimum_is_a_miss_that_says_so(caller: Caller, tokenizer: Any) -> None:
    first, other = ids_of(tokenizer, 15, 200), ids_of(tokenizer, 16, 200)
    caller.complete(first)
    answer = caller.complete(branch(first, 31, other))
    assert (answer.cached, answer.report["miss_reason"]) == (0, "below_min_match")
    assert caller.complete(branch(first, 32, other)).cached == 32


def test_agents_in_turn_do_not_disturb_each_other(caller: Caller) -> None:
    agents = [document(seed, sentences=30) for seed in range(20, 26)]
    chats: list[list[dict[str, str]]] = [[] for _ in agents]
    right = 0
    for turn, key in enumerate(KEYS[:3]):
        for (text, numbers), chat in zip(agents, chats, strict=True):
            chat.append({"role": "user", "content": question(key) if turn else f"{text}\n{question(key)}"})
            answer = caller.chat(chat)
            assert (answer.cached > 0) == (turn > 0)
            right += answer.text == numbers[key]
            # Whatever the small model gets wrong, it never knows another agent's number.
            assert answer.text not in {others[key] for _, others in agents if others is not numbers}
            chat.append({"role": "assistant", "content": answer.text})
    assert right >= 16


def test_text_and_token_ids_share(caller: Caller, tokenizer: Any) -> None:
    text = filler(27, 40)
    ids = tokenizer.encode(text)
    caller.complete(text)
    assert caller.complete(ids).cached == len(ids) - 1


def test_batch_of_prompts_adds_up(caller: Caller, client: openai.OpenAI, tokenizer: Any) -> None:
    shared, tails = ids_of(tokenizer, 28, 300), [ids_of(tokenizer, seed, 50) for seed in (29, 30, 31)]
    prompts = [
        branch([*shared, *tail], 300, tails[0]) if index else [*shared, *tail] for index, tail in enumerate(tails)
    ]
    prompts[1], prompts[2] = branch(prompts[0], 300, tails[1]), branch(prompts[0], 310, tails[2])
    response = client.completions.create(
        model="bundled", prompt=prompts, max_tokens=1, temperature=0, extra_body={"cache_salt": caller.salt}
    )
    assert [choice.index for choice in response.choices] == [0, 1, 2]
    assert response.usage is not None
    assert response.usage.prompt_tokens == 3 * 350
    assert response.usage.prompt_tokens_details is not None
    assert response.usage.prompt_tokens_details.cached_tokens == 300 + 310
    report: dict[str, Any] = response.tailreplay  # type: ignore[attr-defined]
    assert [part["matched"] for part in report["prompts"]] == [0, 300, 310]
    assert report["matched"] == 610


def test_batch_of_texts(client: openai.OpenAI, caller: Caller) -> None:
    text, numbers = document(32, sentences=30)
    response = client.completions.create(
        model="bundled",
        prompt=[f"{text}\n{question(key)}\nAnswer: " for key in KEYS[:3]],
        max_tokens=8,
        temperature=0,
        extra_body={"cache_salt": caller.salt},
    )
    assert [choice.text for choice in response.choices] == [numbers[key] for key in KEYS[:3]]


def test_salts_never_share(client: openai.OpenAI, tokenizer: Any, caller: Caller) -> None:
    ids = ids_of(tokenizer, 33, 300)
    others = [Caller(client, tokenizer, salt) for salt in (caller.salt + "b", caller.salt.upper())]
    for own in (caller, *others):
        assert own.complete(ids).cached == 0
    without = client.completions.create(model="bundled", prompt=ids, max_tokens=1)
    assert without.usage is not None
    assert without.usage.prompt_tokens_details is not None
    assert without.usage.prompt_tokens_details.cached_tokens == 0
    for own in (caller, *others):
        assert own.complete(ids).cached == 299
