"""Tasks: the same for the same seed, of the length asked for, and with true answers."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path

import pytest
from training.evaluate import ASKED
from training.tasks.base import Draw, Kind, Material, Script
from training.tasks.registry import TASKS


@pytest.fixture(scope="module")
def material(data: Path) -> Material:
    return Material(data, "train")


def make(task: str, material: Material, seed: object = 0, characters: int = 2500, last_only: bool = False) -> Script:
    script = Script()
    TASKS[task](script, Draw(random.Random(f"{task}/{seed}"), material, last_only), characters)
    return script


def asked(script: Script) -> list[tuple[str, str, str]]:
    """Each question's text so far, wording and answer."""
    text = script.text
    return [(text[: q.start], text[q.start : q.answer], text[q.answer : q.end].strip()) for q in script.questions]


@pytest.mark.parametrize("task", TASKS)
def test_the_same_seed_gives_the_same_text(task: str, material: Material) -> None:
    assert make(task, material).text == make(task, material).text
    assert make(task, material).text != make(task, material, seed=1).text


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("characters", [350, 3000, 9000])
def test_texts_are_about_as_long_as_asked(task: str, characters: int, material: Material) -> None:
    lengths = [make(task, material, seed, characters).length for seed in range(12)]
    assert max(lengths) < 1.35 * characters + 350
    if task != "repeat":  # its filler is of any length
        assert sorted(lengths)[6] > 0.55 * characters


@pytest.mark.parametrize("task", ASKED)
def test_an_examination_asks_once_at_the_end(task: str, material: Material) -> None:
    for seed in range(12):
        script = make(task, material, seed, last_only=True)
        assert len(script.questions) == 1
        assert script.questions[0].end == script.length


@pytest.mark.parametrize("task", TASKS)
def test_only_answers_count_as_answers(task: str, material: Material) -> None:
    script = make(task, material)
    answers = "".join(part for part, kind in zip(script.parts, script.kinds, strict=True) if kind is Kind.ANSWER)
    assert answers == "".join(script.text[q.answer : q.end] for q in script.questions)


def _variables(before: str, question: str) -> str:
    values: dict[str, str] = {}
    for name, source in re.findall(r"VAR ([a-z ]+) = ([^;]+);", before):
        values[name] = values[source.removeprefix("VAR ")] if source.startswith("VAR") else source
    if question.startswith("Print"):
        return values[question.removeprefix("Print VAR ").removesuffix(": ")]
    wanted = question.removeprefix("Variables that hold ").removesuffix(":")
    return ", ".join(name for name, value in values.items() if value == wanted)


def _count(before: str, question: str) -> str:
    value = 0
    for number, sign in re.findall(r" Set to (\d)\.| (Add|Take) one\.", before):
        value = int(number) if number else value + (1 if sign == "Add" else -1)
    return str(value)


def _slots(before: str, question: str) -> str:
    thing = question.removeprefix("Check ").removesuffix(":")
    return re.findall(rf"Now the {thing} is (\w+)\.", before)[-1]


def _words(before: str, question: str) -> str:
    counts = Counter(before[before.rindex("Words: ") + 7 :].rstrip(".\n").split())
    found = sorted(counts, key=lambda word: (-counts[word], word))
    return ", ".join(found[: 3 if question.startswith("Three") else 1])


def _needle(before: str, question: str) -> str:
    key = re.search(r"(?:numbers? for|code of) (\w+(?: \w+)?)(?: mentioned.*)?[?.:]|number for (\w+)", question)
    assert key is not None
    name = (key[1] or key[2]).removesuffix(" mentioned")
    return ", ".join(re.findall(rf"(?:numbers? for|code of) {name} is:? (\d+)\.", before))


@pytest.mark.parametrize(
    ("task", "solve"),
    [
        ("variables", _variables),
        ("count", _count),
        ("slots", _slots),
        ("words", _words),
        ("needle", _needle),
    ],
)
@pytest.mark.parametrize("last_only", [False, True])
def test_answers_are_true(task: str, solve: object, last_only: bool, material: Material) -> None:
    for seed in range(25):
        for before, question, answer in asked(make(task, material, seed, last_only=last_only)):
            assert solve(before, question) == answer, (question, before)  # type: ignore[operator]


def test_keys_and_lines_are_answered_by_their_statements(material: Material) -> None:
    for seed in range(25):
        for before, question, answer in asked(make("keys", material, seed)):
            assert f"{question.removeprefix('Get ')}{answer};" in before
        for before, question, answer in asked(make("lines", material, seed)):
            assert f"\n{question.removeprefix('Repeat ')} {answer}" in before


def test_a_passage_is_repeated(material: Material) -> None:
    for seed in range(25):
        script = make("repeat", material, seed)
        (_, question, answer), *_ = asked(script)
        assert script.text.startswith(question.removeprefix("Repeat the first passage: ") + " " + answer)


def test_a_chat_is_what_the_template_renders(material: Material) -> None:
    """Turns are lines, answers begin with 'Answer: ': as chat_template.jinja has it."""
    import jinja2
    from training.export import TEMPLATE

    template = jinja2.Environment().from_string(TEMPLATE.read_text(encoding="utf-8"))
    script = make("chat", material, last_only=True)
    before, question, answer = asked(script)[0]
    content = before + question.removesuffix("\nAnswer: ")
    assert (
        template.render(messages=[{"role": "user", "content": content}], add_generation_prompt=True)
        == before + question
    )
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    assert template.render(messages=turns) + "\n" == script.text
