"""Where a task's prompt is cut into the context, which is cached, and the query, which comes after it.

Facts about the tasks' wording, as of lm-eval 0.4.13. A rule that does not find its words (a template of one's own, a prompt
that was cut) leaves the choice to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Rule = Callable[[Mapping[str, Any], str], int | None]
_QUESTION_FIELDS = ("question", "input")


def split_offset(task: str, doc: Mapping[str, Any], prompt: str) -> int | None:
    """Return the character of `prompt` at which the query begins.

    Parameters
    ----------
    task : str
        Name of the task. A name that goes on after a known one (``longbench_qasper_e``) is cut in the same way.
    doc : mapping
        The task's document, for its question.
    prompt : str
        The text that the model reads, in whatever chat template and after whatever examples.

    Returns
    -------
    int or None
        None if there is no rule, or if the rule does not find its words: the last tokens are the query then.
    """
    name = task.removeprefix("longbench_")
    known = [key for key in RULES if name == key or name.startswith(f"{key}_")]
    return RULES[max(known, key=len)](doc, prompt) if known else None


def at_words(*choices: str) -> Rule:
    """The query begins with the last occurrence of any of these words before the document's question (or the end)."""

    def rule(doc: Mapping[str, Any], prompt: str) -> int | None:
        # The question itself may repeat the words.
        question = _question_at(doc, prompt)
        before = len(prompt) if question is None else question
        found = max(prompt.rfind(words, 0, before) for words in choices)
        return found if found >= 0 else question

    return rule


def _question_at(doc: Mapping[str, Any], prompt: str) -> int | None:
    for field in _QUESTION_FIELDS:
        question = doc.get(field)
        if isinstance(question, str) and question.strip():
            found = prompt.rfind(question.strip())
            return found if found >= 0 else None
    return None


def at_last(*choices: str) -> Rule:
    """The query begins with the last occurrence of any of these words; the document is not looked at."""

    def rule(doc: Mapping[str, Any], prompt: str) -> int | None:
        found = max(prompt.rfind(words) for words in choices)
        return found if found >= 0 else None

    return rule


_PASSAGES = at_words("Answer the question based on the given passages.")
_NEEDLE = at_last("What is the special magic", "What are all the special magic")

RULES: dict[str, Rule] = {
    # RULER. Its documents' field `input` is the whole prompt, and the examples before it ask the same question.
    "niah": _NEEDLE,
    "ruler_vt": at_last("Question: Find all variables that are assigned the value"),
    "ruler_cwe": at_last("Question: What are the 10 most common words in the above list?"),
    "ruler_fwe": at_last("Question: Do not provide any explanation."),
    "ruler_qa": at_last("\n\nQuestion: "),
    # LongBench: one document.
    "narrativeqa": at_words("Now, answer the question based on the story"),
    "qasper": at_words("Answer the question based on the above article"),
    "multifieldqa_en": at_words("Now, answer the following question based on the above text"),
    "multifieldqa_zh": at_words("现在请基于上面的文章回答下面的问题"),
    # LongBench: several documents.
    "hotpotqa": _PASSAGES,
    "2wikimqa": _PASSAGES,
    "musique": _PASSAGES,
    "dureader": at_words("请基于上述文章回答下面的问题"),
    # LongBench: summaries.
    "gov_report": at_last("Now, write a one-page summary of the report."),
    "qmsum": at_words("Now, answer the query based on the above meeting transcript"),
    "multi_news": at_last("Now, write a one-page summary of all the news."),
    "vcsum": at_last("会议总结："),
    # LongBench: examples, then the question itself.
    "trec": _question_at,
    "triviaqa": _question_at,
    "samsum": _question_at,
    "lsht": _question_at,
    # LongBench: made-up tasks.
    "passage_count": at_last("Please enter the final count of unique paragraphs"),
    "passage_retrieval_en": at_words("The following is an abstract."),
    "passage_retrieval_zh": at_words("下面是一个摘要"),
    # LongBench: code. The second one's question is the beginning of the file to be continued.
    "lcc": at_last("Next line of code:"),
    "repobench-p": _question_at,
}
