"""Generation: sampling, streaming, stopping, batches, cancelling, failing loads."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from transformers import GenerationConfig

from tailreplay import HybridLM, InvalidRequestError, PrefixCache, UnsupportedModelError
from tailreplay.tiers.host import HostArena
from tests.engine.tiny_models import random_ids, tiny_model

NEEDLE = (
    "The path goes along the water. " * 20
    + "The special magic number for apple is 48213. "
    + "She reads a book by the window. " * 20
    + "\nQuestion: What is the special magic number for apple?\nAnswer: "
)


@pytest.mark.parametrize("mode", ["off", 0.05, "exact"])
def test_the_bundled_model_answers_after_a_hit(bundled: HybridLM, mode: float | str) -> None:
    bundled.generate(NEEDLE, max_new_tokens=1, salt="needle")
    result = bundled.generate(NEEDLE, max_new_tokens=8, replay=mode, salt="needle")
    assert result.text == "48213"
    assert result.finish_reason == "stop"
    assert result.reuse.matched == (0 if mode == "off" else result.reuse.prompt_tokens - 1)


def test_answers_equal_those_of_the_library(bundled: HybridLM) -> None:
    """Greedy, cold: the same tokens as transformers' own generate."""
    ids = bundled.encode(NEEDLE)
    result = bundled.generate(ids, max_new_tokens=12, stop=[], salt="library")
    expected = bundled.model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, stop_strings=None)
    assert result.tokens == expected[0, len(ids) :].tolist()[: len(result.tokens)]
    assert len(result.tokens) > 5


def test_a_seed_fixes_the_sample_and_another_changes_it(tiny: HybridLM) -> None:
    prompt = random_ids(40)
    settings = {"max_new_tokens": 12, "temperature": 5.0, "replay": "off"}
    first, again, other = (tiny.generate(prompt, seed=seed, **settings).tokens for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_top_k_of_one_is_greedy(tiny: HybridLM) -> None:
    prompt = random_ids(40)
    greedy = tiny.generate(prompt, max_new_tokens=8, replay="off").tokens
    assert tiny.generate(prompt, max_new_tokens=8, temperature=3.0, top_k=1, seed=3, replay="off").tokens == greedy
    assert tiny.generate(prompt, max_new_tokens=8, temperature=3.0, top_p=1e-6, seed=3, replay="off").tokens == greedy


def test_streamed_pieces_make_up_the_text(bundled: HybridLM) -> None:
    stream = bundled.stream(NEEDLE, max_new_tokens=20, stop=[], salt="stream")
    pieces = list(stream)
    assert len(pieces) > 1
    assert "".join(pieces) == stream.result.text


def test_a_stop_string_ends_the_answer_and_is_left_out(bundled: HybridLM) -> None:
    whole = bundled.generate(NEEDLE, max_new_tokens=8, salt="stop")
    cut = bundled.generate(NEEDLE, max_new_tokens=8, stop=["21"], salt="stop")
    assert whole.text == "48213"
    assert cut.text == "48"
    assert cut.finish_reason == "stop"


def test_generated_tokens_are_reused_but_the_last_one(tiny: HybridLM) -> None:
    prompt = random_ids(70)
    answer = tiny.generate(prompt, max_new_tokens=30)
    again = tiny.generate([*prompt, *answer.tokens, 9, 9], max_new_tokens=1)
    assert again.reuse.matched == len(prompt) + len(answer.tokens) - 1


def test_a_page_can_be_hit_before_its_request_has_ended(tiny: HybridLM) -> None:
    prompt = random_ids(64 * 3 + 10)
    matched = []

    class Watch(threading.Event):
        """Looks the prompt up each time the generation asks whether to go on."""

        def is_set(self) -> bool:
            plan = tiny.cache.lookup(prompt, tiny.namespace(), tiny.reuse, tiny.backbone.topology)
            tiny.cache.release(plan)
            matched.append(plan.matched)
            return False

    tiny.prefill_chunk = 64
    list(tiny.stream(prompt, max_new_tokens=2, cancel=Watch()))
    assert matched[:4] == [0, 64, 128, 192]


def test_cancelling_ends_at_the_next_step_and_frees_everything(tiny: HybridLM) -> None:
    cancel = threading.Event()
    cancel.set()
    stream = tiny.stream(random_ids(200), max_new_tokens=50, cancel=cancel)
    list(stream)
    assert stream.result.finish_reason == "cancelled"
    assert stream.result.tokens == []
    assert tiny.cache.stats().pinned == 0


def test_an_abandoned_stream_unpins_its_pages(bundled: HybridLM) -> None:
    bundled.generate(NEEDLE, max_new_tokens=1, salt="left")
    pieces = iter(bundled.stream(NEEDLE, max_new_tokens=50, stop=[], salt="left"))
    assert next(pieces)
    assert bundled.cache.stats().pinned > 0
    pieces.close()  # type: ignore[attr-defined]
    assert bundled.cache.stats().pinned == 0
    assert bundled.generate(NEEDLE, max_new_tokens=1, salt="left").reuse.miss_reason == ""


def test_a_stream_in_a_stream_is_an_error_instead_of_a_deadlock(bundled: HybridLM) -> None:
    pieces = iter(bundled.stream(NEEDLE, max_new_tokens=50, stop=[], salt="nested"))
    next(pieces)
    with pytest.raises(RuntimeError, match="in the middle of a stream"):
        bundled.generate(NEEDLE, max_new_tokens=1)
    pieces.close()  # type: ignore[attr-defined]
    assert bundled.generate(NEEDLE, max_new_tokens=8, salt="nested").text == "48213"


def test_two_wrappers_of_one_model_take_turns() -> None:
    """Neither captures what the other computes."""
    one, two = (HybridLM(tiny_model("qwen3_5"), cache=PrefixCache("32MiB")) for _ in range(2))
    assert one.lock is two.lock
    assert one.backbone.taps is two.backbone.taps
    sink: list[list[torch.Tensor]] = [[] for _ in one.backbone.topology.stored_groups]
    with one.backbone.taps.into(sink):
        other = threading.Thread(target=lambda: two.model(torch.tensor([random_ids(50)])))
        other.start()
        other.join()
    assert sink == [[] for _ in sink]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_batch_that_fails_leaves_nothing_pinned(
    tiny: HybridLM, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    prompts = [[*random_ids(150), 5], [*random_ids(150), 6, 7]]
    tiny.generate(prompts, max_new_tokens=1)

    def broken(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(tiny.backbone, "forward", broken)
        with pytest.raises(error):
            tiny.generate([[*prompt, 9] for prompt in prompts], max_new_tokens=1)
    assert tiny.cache.stats().pinned == 0


def test_an_interrupted_load_leaves_nothing_pinned(tiny: HybridLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = random_ids(300)
    tiny.generate(prompt, max_new_tokens=1)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(HostArena, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tiny.generate(prompt, max_new_tokens=1)
    assert tiny.cache.stats().pinned == 0
    assert tiny.generate(prompt, max_new_tokens=1).reuse.matched == 299


def test_a_load_that_fails_is_recomputed(
    bundled: HybridLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = bundled.generate(NEEDLE, max_new_tokens=8, salt="load").reuse.prompt_tokens

    def broken(*_: object) -> None:
        raise RuntimeError("the page is gone")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(HostArena, "read", broken)
        failed = bundled.generate(NEEDLE, max_new_tokens=8, salt="load")
    assert failed.text == "48213"
    assert failed.reuse.matched == 0
    assert failed.reuse.miss_reason == "load_failed"
    assert f"Loading {tokens - 1} cached tokens failed" in caplog.text
    assert bundled.cache.stats().pinned == 0
    assert bundled.generate(NEEDLE, max_new_tokens=1, salt="load").reuse.matched == tokens - 1


def test_a_store_that_fails_does_not_fail_the_answer(
    bundled: HybridLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pages = bundled.cache.stats().pages

    def broken(*_: object) -> None:
        raise RuntimeError("no room")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(HostArena, "write", broken)
        assert bundled.generate(NEEDLE, max_new_tokens=8, salt="store").text == "48213"
    assert bundled.cache.stats().pages == pages
    assert "no room" in caplog.text


def test_zero_mode_is_never_stored(tiny: HybridLM) -> None:
    prompt = random_ids(130)
    tiny.generate(prompt, max_new_tokens=1, replay="zero")
    assert tiny.cache.stats().pages == 0


def test_a_cache_that_is_too_small_for_a_prompt_keeps_what_fits() -> None:
    lm = HybridLM(tiny_model("qwen3_5"), cache=PrefixCache(3 * 64 * 768))
    assert lm.backbone.layout.page_bytes == 64 * 768
    prompt = random_ids(500)
    lm.generate(prompt, max_new_tokens=3)
    assert lm.generate(prompt, max_new_tokens=3, replay="exact").reuse.matched == 3 * 64
    assert lm.cache.stats().pinned == 0


def test_models_of_one_layout_share_a_cache_but_never_pages() -> None:
    cache = PrefixCache("32MiB")
    one, two = (HybridLM(tiny_model("qwen3_5", seed), cache=cache) for seed in (0, 1))
    prompt = random_ids(100)
    one.generate(prompt, max_new_tokens=1)
    assert two.generate(prompt, max_new_tokens=1).reuse.miss_reason == "unseen_prefix"
    assert one.generate(prompt, max_new_tokens=1).reuse.matched == 99


def test_salts_are_kept_apart(tiny: HybridLM) -> None:
    prompt = random_ids(100)
    tiny.generate(prompt, max_new_tokens=1, salt="a")
    assert tiny.generate(prompt, max_new_tokens=1, salt="b").reuse.matched == 0
    assert tiny.generate(prompt, max_new_tokens=1).reuse.matched == 0
    assert tiny.generate(prompt, max_new_tokens=1, salt="a").reuse.matched == 99


def test_threads_take_turns(bundled: HybridLM) -> None:
    got: dict[int, str] = {}

    def ask(i: int) -> None:
        prompt = NEEDLE.replace("48213", f"{i}8213")
        got[i] = bundled.generate(prompt, max_new_tokens=8, salt="threads").text

    threads = [threading.Thread(target=ask, args=(i,)) for i in (4, 5, 6, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {i: f"{i}8213" for i in (4, 5, 6, 7)}


@pytest.mark.parametrize("ignore", [False, True])
def test_end_tokens_can_be_ignored(tiny: HybridLM, monkeypatch: pytest.MonkeyPatch, ignore: bool) -> None:
    prompt = random_ids(30)
    (first,) = tiny.generate(prompt, max_new_tokens=1, store=False).tokens
    monkeypatch.setattr(tiny.model, "generation_config", GenerationConfig(eos_token_id=first))
    result = tiny.generate(prompt, max_new_tokens=3, ignore_eos=ignore, store=False)
    assert len(result.tokens) == (3 if ignore else 1)
    assert result.finish_reason == ("length" if ignore else "stop")


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "empty"),
        ("", {}, "no tokenizer"),
        ([97], {}, "0 to 96"),
        ([-1, 5], {}, "0 to 96"),
        ([3] * 4096, {}, "at most 4095"),
        ([3, 4], {"max_new_tokens": 0}, "at least 1"),
        ([3, 4], {"temperature": -1.0}, "negative"),
        ([3, 4], {"top_p": 0.0}, r"\(0, 1\]"),
        ([3, 4], {"top_k": -2}, "at least 0"),
        (None, {}, "must be a text or a list"),
        ([3, 4], {"seed": 1 << 70}, "64 bits"),
        ([3, 4], {"replay": 0}, r"\(0, 1\]"),
        ([3, 4], {"replay": 1.5}, r"\(0, 1\]"),
        ([3, 4], {"replay": "abc"}, "must be one of"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(
    tiny: HybridLM, prompt: list[int] | str, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        tiny.generate(prompt, **settings)


def test_an_empty_text_is_refused(bundled: HybridLM) -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        bundled.generate("")


def test_a_text_that_is_far_too_long_is_refused_before_it_is_tokenised(
    bundled: HybridLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(bundled.tokenizer), "encode", lambda *_, **__: pytest.fail("tokenised"))
    with pytest.raises(InvalidRequestError, match="at most 8191"):
        bundled.generate("word " * 2_000_000)


@pytest.mark.parametrize("device", ["cuda:9", "gpu"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"'{device}' cannot be used: [^\\n]+$"):
        HybridLM.from_pretrained("bundled", device=device)


def test_a_stream_can_be_closed(bundled: HybridLM) -> None:
    stream = bundled.stream(NEEDLE, max_new_tokens=50, stop=[], salt="close")
    assert next(iter(stream))
    stream.close()
    assert bundled.cache.stats().pinned == 0
    assert bundled.generate(NEEDLE, max_new_tokens=8, salt="close").text == "48213"


def test_an_empty_batch_is_refused(tiny: HybridLM) -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        tiny.generate([[], []])


def test_the_answer_ends_at_the_models_longest_sequence() -> None:
    lm = HybridLM(tiny_model("qwen3_5"), cache=PrefixCache("32MiB"))
    result = lm.generate(random_ids(4090), max_new_tokens=50, store=False)
    assert len(result.tokens) == 6
    assert result.finish_reason == "length"
