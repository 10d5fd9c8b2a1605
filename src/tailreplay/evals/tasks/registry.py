"""All tasks by name."""

from __future__ import annotations

from tailreplay.errors import InvalidRequestError
from tailreplay.evals.info import TaskInfo
from tailreplay.evals.tasks import lookup, people, prose, running, words
from tailreplay.evals.tasks.base import Task, Write


def _task(
    name: str, title: str, write: Write, probes: int, discriminates: bool = False, retrieval: bool = False
) -> Task:
    return Task(TaskInfo(name, title, discriminates, retrieval), write, probes)


_ALL = (
    _task("prose", "plain text, continued", prose.prose, prose.HITS, discriminates=True),
    _task(
        "mid_question",
        "hit inside a question",
        people.mid_question,
        people.QUESTIONS,
        discriminates=True,
        retrieval=True,
    ),
    _task("count", "running count", running.count, running.COUNT_HITS, discriminates=True),
    _task("counting_chat", "ten turns, running count", people.counting_chat, people.TURNS, discriminates=True),
    _task("common_words", "common words", words.common_words, words.HITS),
    _task("frequent_words", "frequent words", words.frequent_words, words.HITS),
    # Attention finds the latest value by itself: the bundled model answers as well from zero states.
    _task("slots", "latest of changing values", running.slots, 2 * running.SLOT_HITS, retrieval=True),
    _task("single_needle", "single needle", lookup.single_needle, lookup.SINGLE_HITS, retrieval=True),
    _task("many_needles", "needle among many", lookup.many_needles, lookup.QUESTIONS, retrieval=True),
    _task("many_values", "several values of a key", lookup.many_values, 5, retrieval=True),
    _task("key_value", "long list of keys", lookup.key_value, lookup.QUESTIONS, retrieval=True),
    _task("variables", "variable tracking", lookup.variables, 5, retrieval=True),
    _task("document_qa", "questions about a document", people.document_qa, people.QUESTIONS, retrieval=True),
    _task("chat", "ten turns about a document", people.chat, people.TURNS),
)
TASKS: dict[str, Task] = {task.info.name: task for task in _ALL}


def tasks_named(names: list[str]) -> list[Task]:
    """Return tasks by name, in the order of the registry.

    Raises
    ------
    InvalidRequestError
        If there is no such task.
    """
    for name in names:
        if name not in TASKS:
            raise InvalidRequestError(f"There is no task {name!r}; there are {', '.join(TASKS)}.")
    return [task for name, task in TASKS.items() if name in names]
