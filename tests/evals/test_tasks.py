"""Documents say what their questions ask for, where they say it, and within their length."""

from __future__ import annotations

import random
import re
from collections import Counter
from functools import cache

import pytest
from transformers import AutoTokenizer

from tailreplay.errors import InvalidRequestError
from tailreplay.evals.document import Document, Probe
from tailreplay.evals.material import Material, python_topics, text_file
from tailreplay.evals.tasks.base import RESERVE
from tailreplay.evals.tasks.registry import TASKS, tasks_named
from tailreplay.loading import BUNDLED

LENGTHS = (1024, 2048, 8192)


@cache
def tokenizer():
    return AutoTokenizer.from_pretrained(BUNDLED)


@cache
def material() -> Material:
    return python_topics()


def encode(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def decode(ids) -> str:
    return tokenizer().decode(list(ids))


def document(name: str, length: int, index: int = 0, seed: int = 0) -> Document:
    return TASKS[name].document(length, index, seed, material(), encode)


def probes(made: Document) -> list[tuple[list[int], Probe]]:
    return [([*made.ids[: hit.at], *hit.extra], probe) for hit in made.hits for probe in hit.probes]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", TASKS)
def test_a_document_fits_its_length_and_has_its_samples(name: str, length: int) -> None:
    made = document(name, length)
    assert len(made.ids) <= length - RESERVE
    # A conversation leaves room for its turns.
    assert len(made.ids) > (0.25 if made.turns else 0.95) * (length - RESERVE)
    assert TASKS[name].probes == len(probes(made)) + len(made.turns)
    for prefix, probe in probes(made):
        assert prefix
        assert probe.query
        longest = probe.longest if probe.answers else 0
        assert len(prefix) + len(probe.query) + max(len(probe.reference), longest) <= length
        assert probe.evidence is None or 0 <= probe.evidence < len(prefix)
    assert len(made.ids) + sum(len(turn.query) + turn.longest for turn in made.turns) <= length
    assert [hit.at for hit in made.hits] == sorted(hit.at for hit in made.hits)


@pytest.mark.parametrize("name", TASKS)
def test_seeds_and_numbers_decide_alone(name: str) -> None:
    assert document(name, 1024) == document(name, 1024)
    others = [document(name, 1024, index=1), document(name, 1024, seed=1)]
    assert all(document(name, 1024) != other for other in others)


RETRIEVAL = [name for name, task in TASKS.items() if task.info.retrieval and name != "variables"]


@pytest.mark.parametrize("name", RETRIEVAL)
def test_the_answer_stands_where_the_evidence_begins(name: str) -> None:
    for prefix, probe in probes(document(name, 2048)):
        text = decode(prefix[probe.evidence :])
        assert all(answer in text for answer in probe.answers)
        assert probe.answers[0] in decode(prefix[probe.evidence : probe.evidence + 30])
        assert decode(probe.reference).strip() == ", ".join(probe.answers)


def test_variables_lead_back_to_their_value() -> None:
    for prefix, probe in probes(document("variables", 2048)):
        text = decode(prefix)
        value = re.search(r"VAR (\w+):", decode(probe.query)).group(1)
        for _ in range(4):
            found = re.search(rf"VAR {value} = (?:VAR )?(\w+);", text)
            if found is None:
                break
            value = found.group(1)
        assert value == probe.answers[0]
        assert re.match(rf" VAR \w+ = {value};", decode(prefix[probe.evidence :]))


@pytest.mark.parametrize("index", range(5))
def test_the_count_is_right(index: int) -> None:
    for prefix, probe in probes(document("count", 1024, index)):
        value = None
        for event in re.findall(r"Set to (\d)|(Add|Take) one", decode(prefix)):
            value = int(event[0]) if event[0] else value + (1 if event[1] == "Add" else -1)
        assert probe.answers == (str(value),)
        assert decode(prefix[probe.evidence :]).startswith(" Set to ")
        assert decode(prefix[probe.evidence + 1 :]).count("Set to") == 0


def test_things_have_the_value_they_had_last() -> None:
    for prefix, probe in probes(document("slots", 1024)):
        thing = re.search(r"Check (\w+):", decode(probe.query)).group(1)
        assert re.findall(rf"Now the {thing} is (\w+)", decode(prefix))[-1] == probe.answers[0]


@pytest.mark.parametrize("name", ["common_words", "frequent_words"])
@pytest.mark.parametrize("index", range(5))
def test_the_three_most_frequent_words_are_clear(name: str, index: int) -> None:
    for prefix, probe in probes(document(name, 1024, index)):
        counts = Counter(decode(prefix).removeprefix("Words:").split())
        frequent = counts.most_common(4)
        assert frequent[2][1] > frequent[3][1]
        assert {word for word, _ in frequent[:3]} == set(probe.answers)


def test_prose_goes_on_as_the_text_does() -> None:
    made = document("prose", 1024)
    for prefix, probe in probes(made):
        rest = (*prefix, *probe.query, *probe.reference)
        assert rest[: len(made.ids)] == made.ids[: len(rest)]
        assert not probe.answers


def test_a_hit_inside_a_question_leaves_two_tokens_to_read() -> None:
    for prefix, probe in probes(document("mid_question", 1024)):
        assert len(probe.query) == 2
        assert "Question:" in decode(prefix[-60:])


def test_counting_chat_counts() -> None:
    made = document("counting_chat", 1024)
    value = int(re.search(r"Set to (\d)\.$", decode(made.ids)).group(1))
    for turn in made.turns:
        value += 1 if "Add one." in decode(turn.query) else -1
        assert turn.answers == (str(value),)


def test_unknown_tasks_are_named() -> None:
    with pytest.raises(InvalidRequestError, match="no task 'nope'; there are prose"):
        tasks_named(["count", "nope"])


def test_text_of_ones_own(tmp_path) -> None:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=6)) for _ in range(1200)]
    paragraphs = [" ".join(" ".join(rng.choices(words, k=9)).capitalize() + "." for _ in range(4)) for _ in range(400)]
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(paragraphs), encoding="utf-8")
    made = text_file(path)
    assert made.paragraphs == paragraphs
    assert made.digest != material().digest
    path.write_text("Too little text to write documents of it, and no paragraph besides this one.", encoding="utf-8")
    with pytest.raises(InvalidRequestError, match="characters of prose"):
        text_file(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        text_file(path)
