"""All tasks by name."""

from __future__ import annotations

from collections.abc import Callable

from training.tasks.base import Draw, Script
from training.tasks.chat import chat
from training.tasks.count import count
from training.tasks.keys import keys
from training.tasks.lines import lines
from training.tasks.needle import needle
from training.tasks.repeat import repeat
from training.tasks.slots import slots
from training.tasks.text import text
from training.tasks.variables import variables
from training.tasks.words import words

Task = Callable[[Script, Draw, int], None]

TASKS: dict[str, Task] = {
    task.__name__: task for task in (keys, needle, variables, count, slots, words, repeat, lines, chat, text)
}
