"""Where prompts are cut: the templates of the installed lm-eval, with made-up documents."""

from __future__ import annotations

import re
from pathlib import Path

import lm_eval.tasks
import pytest
import yaml
from jinja2 import Template

from tailreplay.evals.lm_eval.splits import RULES, split_offset

LONGBENCH = sorted(Path(lm_eval.tasks.__file__).parent.glob("longbench/[!_]*.yaml"))
QUESTION = "Question: Where did the ship sail?"
# Words that rules look for, in the context too: a document may quote its own instruction.
DECOYS = [
    "The ship sailed to Riga. It came back in May.",
    "They wrote: Now, write a one-page summary of the report. And: Now, write a one-page summary of all the news.",
    "Answer the question based on the given passages. Answer the question based on the above article. The end.",
    f"{QUESTION} Next line of code: The following is an abstract. 会议总结： 下面是一个摘要 1 2 3.",
]


class _Loader(yaml.SafeLoader):
    """Reads the harness' files without the functions that they name."""


_Loader.add_multi_constructor("!function", lambda loader, suffix, node: None)


@pytest.mark.parametrize("context", DECOYS)
@pytest.mark.parametrize("path", LONGBENCH, ids=lambda path: path.stem)
def test_longbench_queries_begin_right_after_the_context(path: Path, context: str) -> None:
    config = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    doc = {"context": context, "question": QUESTION, "answers": ["Riga"]}
    prompt = Template(config["doc_to_text"]).render(**doc)
    offset = split_offset(config["task"], doc, prompt)
    assert offset is not None
    end = prompt.index(context) + len(context)
    assert prompt[end:offset].strip() == ""
    assert offset >= end


def test_every_longbench_task_is_there() -> None:
    assert len(LONGBENCH) > 30


SEA = "The sea was calm. What is the special magic number for pear? One of the special magic numbers for fig is: 123."
VT_QUESTION = "Question: Find all variables that are assigned the value 41064 in the text above."


@pytest.mark.parametrize(
    ("task", "context", "query"),
    [
        (
            "niah_single_1",
            SEA,
            "What is the special magic number for fig mentioned in the provided text? The special is",
        ),
        (
            "niah_multikey_3",
            SEA,
            "What is the special magic uuid for fig mentioned in the provided text? The special is",
        ),
        (
            "niah_multivalue",
            SEA,
            "What are all the special magic numbers for fig mentioned in the provided text? They are",
        ),
        ("ruler_vt", f"VAR A = 41064 {VT_QUESTION} Answer: A\n\nVAR B = 7", f"{VT_QUESTION} Answer: According to"),
        (
            "ruler_cwe",
            "1. sea 2. sea 3. ship",
            "Question: What are the 10 most common words in the above list? Answer:",
        ),
        (
            "ruler_fwe",
            "abc ... abc",
            "Question: Do not provide any explanation. Please ignore the dots. Which? Answer:",
        ),
        ("ruler_qa_squad", "Document 1: a\n\nQuestion: b\n\nOnly give me the answer.", "Question: Where? Answer:"),
        ("ruler_qa_hotpot", "Document 1:\nThe sea.\n\nOnly give me the answer.", "Question: Where? Answer:"),
    ],
)
def test_ruler_queries_are_the_last_question_and_what_begins_the_answer(task: str, context: str, query: str) -> None:
    prompt = f"{context}\n\n{query}"
    offset = split_offset(task, {"input": prompt[:-10]}, prompt)
    assert offset is not None
    assert prompt[offset:].strip() == query
    wrapped = f"<user>{prompt}</user><assistant>"
    assert split_offset(task, {"input": prompt[:-10]}, wrapped) == offset + len("<user>")


def test_tasks_named_after_a_known_one_are_cut_like_it() -> None:
    prompt = "A ship.\n\nThe following is an abstract.\n\nabc"
    doc = {"question": "abc"}
    for name in ("longbench_passage_retrieval_en", "longbench_passage_retrieval_en_e", "passage_retrieval_en_mine"):
        assert split_offset(name, doc, prompt) == 9
    assert split_offset("passage_retrieval_english", doc, prompt) is None


def test_a_template_of_ones_own_is_cut_at_the_question() -> None:
    assert split_offset("longbench_qasper", {"input": "Who?"}, "A ship sailed.\nQ: Who?\nA:") == 18


@pytest.mark.parametrize("task", ["hellaswag", "", "longbench", *RULES])
def test_without_known_words_there_is_no_offset(task: str) -> None:
    assert split_offset(task, {"question": "Who?", "text": "abc"}, "A text about a ship.") is None


def test_the_docs_name_every_rule() -> None:
    text = (Path(__file__).parents[2] / "docs" / "lm-eval.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w-]+?)_?\*?`", text))
    assert {name for name in RULES if name not in named} == set()
