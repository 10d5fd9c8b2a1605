"""What a request says about the cache, and what the response says in return."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tailreplay.errors import InvalidRequestError
from tailreplay.modes import parse_reuse
from tailreplay.server.reuse import parse_cache_wish
from tests.server.caller import Caller
from tests.server.texts import branch, document, ids_of, question


def test_defaults_are_reported(caller: Caller, tokenizer: Any) -> None:
    ids = ids_of(tokenizer, 50, 1000)
    caller.complete(ids)
    report = caller.complete(ids).report
    timings = report.pop("timings_ms")
    assert report == {
        "matched": 999,
        "replayed": 64,
        "mode": "replay",
        "ratio": 0.05,
        "exact": False,
        "provenance": "approximate (depth 1)",
        "depth": 1,
        "start": "zero",
        "anchor": None,
        "miss_reason": "",
        "stop": "end",
        "short_tail": False,
        "predicted_error": None,
        "budget_note": "",
    }
    assert set(timings) == {"queued", "lookup", "copy", "replay", "prefill", "first_token", "total", "predicted"}
    assert 0 < timings["prefill"] <= timings["first_token"] <= timings["total"]


@pytest.mark.parametrize(("ratio", "replayed"), [(0.1, 100), (0.07, 70), (1, 1000), (1e-9, 64)])
def test_ratio_decides_how_much_is_replayed(caller: Caller, tokenizer: Any, ratio: float, replayed: int) -> None:
    ids = ids_of(tokenizer, 51, 1001)
    caller.complete(ids)
    report = caller.complete(ids, ratio=ratio).report
    assert (report["matched"], report["replayed"], report["ratio"]) == (1000, replayed, ratio)
    assert report["exact"] == (ratio == 1)


def test_an_error_decides_how_much_is_replayed(caller: Caller, tokenizer: Any) -> None:
    ids = ids_of(tokenizer, 57, 2000)
    caller.complete(ids)
    rough, fine = (caller.complete(ids, error=error, store=False).report for error in (0.9, 0.001))
    assert rough["matched"] == fine["matched"] == 1999
    assert 0 < rough["replayed"] < fine["replayed"] == 500
    assert rough["predicted_error"] <= 0.9
    assert (rough["budget_note"], fine["budget_note"]) == ("", "cut")
    assert fine["predicted_error"] > 0.001
    assert (rough["mode"], rough["ratio"], rough["exact"]) == ("replay", None, False)


def test_every_honest_mode_answers_rightly(caller: Caller) -> None:
    text, numbers = document(52)
    caller.chat([{"role": "user", "content": f"{text}\n{question('apple')}"}])
    messages = [{"role": "user", "content": f"{text}\n{question('garden')}"}]
    for mode in ("off", "exact", "replay"):
        assert caller.chat(messages, mode=mode, store=False).text == numbers["garden"]


def test_exact_after_replay_uses_exact_pages_only(caller: Caller, tokenizer: Any) -> None:
    first, second = ids_of(tokenizer, 53, 1600), ids_of(tokenizer, 54, 1600)
    caller.complete(first)
    # Replayed up to 1201, so that all pages from there on are approximate.
    branched = branch(first, 1201, second)
    assert caller.complete(branched).report["provenance"] == "approximate (depth 1)"
    exact = caller.complete(branched, mode="exact")
    assert (exact.cached, exact.report["replayed"], exact.report["exact"]) == (1201, 1201, True)
    assert exact.report["provenance"] == "exact"
    assert exact.report["stop"] == "approximate"
    # That request computed the approximate pages anew, exactly.
    again = caller.complete(branched, mode="exact")
    assert (again.cached, again.report["exact"]) == (1599, True)


def test_exact_takes_the_exact_tokens_of_a_page_that_another_request_filled_up(caller: Caller, tokenizer: Any) -> None:
    ids = ids_of(tokenizer, 55, 400)
    caller.complete(ids)
    longer = [*ids[:398], *ids_of(tokenizer, 56, 400)]
    # Goes on inside the seventh page, which is then there twice: 14 exact tokens, and 64 that replay stands behind.
    assert caller.complete(longer).report["provenance"] == "approximate (depth 1)"
    report = caller.complete(longer, mode="exact", store=False).report
    assert (report["matched"], report["exact"], report["stop"]) == (398, True, "approximate")


def test_short_hits_are_exact(caller: Caller, tokenizer: Any) -> None:
    first, second = ids_of(tokenizer, 57, 300), ids_of(tokenizer, 58, 300)
    caller.complete(first)
    report = caller.complete(branch(first, 60, second)).report
    assert (report["matched"], report["replayed"], report["exact"], report["provenance"]) == (60, 60, True, "exact")


def test_zero_reuses_but_is_never_stored(caller: Caller, tokenizer: Any) -> None:
    ids = ids_of(tokenizer, 59, 500)
    caller.complete(ids[:300])
    report = caller.complete(ids, mode="zero").report
    assert (report["matched"], report["replayed"], report["exact"]) == (300, 0, False)
    assert caller.complete(ids).cached == 300


def test_off_does_not_look_but_stores(caller: Caller, tokenizer: Any) -> None:
    ids = ids_of(tokenizer, 60, 300)
    for _ in range(2):
        report = caller.complete(ids, mode="off").report
        assert (report["matched"], report["miss_reason"], report["exact"]) == (0, "off", True)
    assert caller.complete(ids).cached == 299


def test_store_false_leaves_nothing(caller: Caller, tokenizer: Any) -> None:
    ids = ids_of(tokenizer, 61, 300)
    caller.complete(ids, store=False)
    assert caller.complete(ids, store=None).cached == 0


def test_kv_transfer_params_are_understood_too(http: httpx.Client, tokenizer: Any, caller: Caller) -> None:
    body = {
        "model": "bundled",
        "prompt": ids_of(tokenizer, 62, 300),
        "max_tokens": 1,
        "cache_salt": caller.salt,
        "kv_transfer_params": {"do_remote_decode": False, "tailreplay": {"mode": "exact"}},
    }
    http.post("/v1/completions", json=body).raise_for_status()
    report = http.post("/v1/completions", json=body).json()["tailreplay"]
    assert (report["mode"], report["matched"], report["replayed"], report["ratio"]) == ("exact", 299, 299, None)


def test_reports_add_up_in_the_metrics(http: httpx.Client, caller: Caller, tokenizer: Any) -> None:
    names = ("prompt_tokens_total", "hit_tokens_total", "replayed_tokens_total", "generated_tokens_total")
    before = metrics(http)
    ids = ids_of(tokenizer, 63, 500)
    answers = [caller.complete(ids), caller.complete(ids, ratio=0.5), caller.complete(ids, mode="exact")]
    after = metrics(http)
    grown = [after[f"tailreplay_{name}"] - before[f"tailreplay_{name}"] for name in names]
    assert grown == [1500, 998, 250 + 499, 3]
    assert sum(answer.report["replayed"] for answer in answers) == 250 + 499
    for series, more in {
        'tailreplay_requests_total{outcome="completed"}': 3,
        'tailreplay_hits_total{provenance="exact"}': 1,
        'tailreplay_hits_total{provenance="approximate"}': 1,
        'tailreplay_misses_total{reason="unseen_prefix"}': 1,
        "tailreplay_time_to_first_token_seconds_count": 3,
    }.items():
        assert after[series] - before.get(series, 0) == more, series
    assert 0 < after["tailreplay_cache_bytes"] <= after["tailreplay_cache_limit_bytes"] == 256 * 2**20
    assert after["tailreplay_cache_pages"] > 0
    assert (
        after["tailreplay_cache_pinned_pages"] == after["tailreplay_queue_length"] == after["tailreplay_running"] == 0
    )


def metrics(http: httpx.Client) -> dict[str, float]:
    """All series of /metrics."""
    lines = http.get("/metrics").raise_for_status().text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {series: float(value) for series, value in pairs}


def test_a_start_leaves_the_server_s_ratio_as_it_is() -> None:
    default = parse_reuse("replay", 0.25, start="carried", reuse_approximate=3)
    asked = parse_cache_wish({"tailreplay": {"start": "zero"}}, default, 64).reuse
    assert (asked.ratio, asked.start, asked.depth) == (0.25, "zero", 3)
    asked = parse_cache_wish({"tailreplay": {"reuse_approximate": "never"}}, default, 64).reuse
    assert (asked.ratio, asked.start, asked.depth) == (0.25, "carried", 0)
    asked = parse_cache_wish({"tailreplay": {"ratio": 0.1}}, default, 64).reuse
    assert (asked.ratio, asked.start, asked.depth) == (0.1, "carried", 3)
    with pytest.raises(InvalidRequestError, match="goes with mode 'replay' only"):
        parse_cache_wish({"tailreplay": {"start": "zero"}}, parse_reuse("exact"), 64)
