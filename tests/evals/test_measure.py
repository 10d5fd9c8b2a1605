"""What is measured of each task: full prefill is the library's own, all of a prefix replayed is full prefill."""

from __future__ import annotations

import pytest
import torch

from tailreplay.evals.document import Document
from tailreplay.evals.measure import contained, first_line
from tailreplay.evals.methods import DEFAULT, parse_methods
from tailreplay.evals.tasks.registry import TASKS
from tests.evals.conftest import Bench

ASKED = [name for name in TASKS if name not in ("prose", "chat", "counting_chat")]
TALKS = ["chat", "counting_chat"]
METHODS = [method.name for method in parse_methods(DEFAULT)]


def plain(bench: Bench, ids: list[int], longest: int) -> str:
    """First line of what transformers itself writes after these tokens."""
    prompt = torch.tensor([ids])
    out = bench.lm.model.generate(prompt, max_new_tokens=longest, do_sample=False, stop_strings=None)
    return first_line(bench.lm.tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True))


@pytest.mark.parametrize("task", ASKED)
def test_full_prefill_answers_as_plain_generate_does(bench: Bench, task: str) -> None:
    document, record = bench.document(task), bench.record(task)
    compared = 0
    for hit, measured in zip(document.hits, record["hits"], strict=True):
        for probe, found in zip(hit.probes, measured["probes"], strict=True):
            if compared == 4:
                return
            ids = [*document.ids[: hit.at], *hit.extra, *probe.query]
            expected = plain(bench, ids, probe.longest)
            answer, score = (found["results"]["full"][name] for name in ("answer", "score"))
            # Nothing is generated after a reference that the model would have written.
            assert expected == answer or (score == 1.0 and expected.startswith(answer))
            assert score == contained(probe.answers, expected)
            compared += 1
    assert compared


@torch.inference_mode()
def test_full_prefill_has_the_losses_of_a_plain_forward(bench: Bench) -> None:
    document, record = bench.document("prose"), bench.record("prose")
    for hit, measured in list(zip(document.hits, record["hits"], strict=True))[:3]:
        (probe,), (found,) = hit.probes, measured["probes"]
        ids = torch.tensor([[*document.ids[: hit.at], *probe.query, *probe.reference]])
        logits = bench.lm.model(ids).logits[0, hit.at + len(probe.query) - 1 : -1].float()
        losses = torch.nn.functional.cross_entropy(logits, torch.tensor(probe.reference), reduction="none")
        assert found["results"]["full"]["nll"] == pytest.approx(float(losses.mean()), abs=1e-4)
        assert found["results"]["full"]["first_nll"] == pytest.approx(float(losses[:8].mean()), abs=1e-4)


@pytest.mark.parametrize("task", TALKS)
def test_a_conversation_under_full_prefill_is_plain_generate(bench: Bench, task: str) -> None:
    document, record = bench.document(task), bench.record(task)
    ids = list(document.ids)
    for turn, measured in list(zip(document.turns, record["hits"], strict=True))[:4]:
        ids += turn.query
        out = bench.lm.model.generate(
            torch.tensor([ids]),
            max_new_tokens=turn.longest,
            do_sample=False,
            stop_strings=["\n"],
            tokenizer=bench.lm.tokenizer,
        )
        text = first_line(bench.lm.tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True))
        assert measured["probes"][0]["results"]["full"]["answer"] == text
        new = out[0, len(ids) :].tolist()
        ids += new[:-1] if len(new) < turn.longest or "\n" in bench.lm.tokenizer.decode(new[-1:]) else new


@pytest.mark.parametrize("task", TASKS)
def test_replaying_everything_is_full_prefill(bench: Bench, task: str) -> None:
    for hit in bench.record(task)["hits"]:
        assert all(error is None or error < 1e-3 for error in hit["state_error"].get("replay@1", []))
        for probe in hit["probes"]:
            full, exact = probe["results"]["full"], probe["results"]["replay@1"]
            assert exact["answer"] == full["answer"]
            assert exact["score"] == full["score"]
            if full["nll"] is not None:
                assert exact["nll"] == pytest.approx(full["nll"], abs=2e-3)


@pytest.mark.parametrize("task", [*ASKED, "prose"])
def test_every_method_is_there_with_its_tail(bench: Bench, task: str) -> None:
    document, record = bench.document(task), bench.record(task)
    assert (record["task"], record["length"], record["document"]) == (task, 1024, 0)
    for planned, hit in zip(document.hits, record["hits"], strict=True):
        m = hit["matched"]
        assert m == planned.matched
        assert hit["tails"] == {"zero": 0} | {
            f"replay@{r:g}": -int(-round(r * m, 9) // 1) for r in (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1)
        }
        assert set(hit["state_error"]) == set(hit["tails"])
        assert hit["state_error"]["zero"] == [1.0] * len(hit["state_error"]["zero"])
        for probe in hit["probes"]:
            assert set(probe["results"]) == set(METHODS)


@pytest.mark.parametrize("task", [*ASKED, "prose"])
def test_states_come_closer_as_the_tail_grows(bench: Bench, task: str) -> None:
    record = bench.record(task)

    def mean(method: str) -> float:
        errors = [error for hit in record["hits"] for error in hit["state_error"][method]]
        return sum(errors) / len(errors)

    found = [mean(f"replay@{r:g}") for r in (0.01, 0.05, 0.25, 0.5, 1)]
    assert found == sorted(found, reverse=True)
    assert found[0] < mean("zero") == 1.0


@pytest.mark.parametrize("task", TALKS)
def test_each_turn_hits_all_before_it(bench: Bench, task: str) -> None:
    document, record = bench.document(task), bench.record(task)
    for number, hit in enumerate(record["hits"]):
        assert hit["turn"] == number
        assert set(hit["probes"][0]["results"]) == set(METHODS) - {"kv-wiped"}
        asked = sum(len(turn.query) for turn in document.turns[:number])
        before = len(document.ids) + asked - 1
        assert hit["matched"] >= before
        # What was matched differs between methods as their answers do.
        assert hit["matched"] >= hit["tails"]["replay@1"] >= before
        assert hit["tails"]["replay@0.05"] < 0.06 * hit["matched"]


def test_batches_of_one_row_give_the_same(bench: Bench) -> None:
    document: Document = bench.document("document_qa")
    asker = bench.measurer._asker
    asker._batch_bytes, before = 1, asker._batch_bytes
    try:
        (alone,) = asker.measure(document)
    finally:
        asker._batch_bytes = before
    (together,) = bench.record("document_qa")["hits"]
    for one, other in zip(alone["probes"], together["probes"], strict=True):
        for method in METHODS:
            assert one["results"][method]["answer"] == other["results"][method]["answer"]
            assert one["results"][method]["nll"] == pytest.approx(other["results"][method]["nll"], abs=2e-3)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (" 123\nand 456", 0.5),
        ("\n\n 456, 123.", 1.0),
        (" 1234", 0.0),
        ("The numbers are 456 and 123", 1.0),
        ("", 0.0),
    ],
)
def test_answers_count_as_whole_words_of_the_first_line(text: str, score: float) -> None:
    assert contained(("123", "456"), text) == score
