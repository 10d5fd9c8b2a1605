"""Loading the harness' tasks and their data, with one sentence for what goes wrong."""

from __future__ import annotations

import contextlib
import difflib
import io
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from datasets.exceptions import DatasetsError
from lm_eval.api.task import Task
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.tasks import TaskManager

from tailreplay.errors import InvalidRequestError, TailReplayError

_UNREACHABLE = (ConnectionError, TimeoutError, httpx.TransportError)


@dataclass(frozen=True)
class LoadedTasks:
    """Tasks by name, with their data, and the manager that they came from."""

    manager: TaskManager
    tasks: dict[str, Task]


def load_tasks(names: list[str], include_path: str | None, metadata: dict[str, Any]) -> LoadedTasks:
    """Load tasks and their data.

    Parameters
    ----------
    names : list of str
        Tasks, groups, tags, patterns like ``niah_*``, or YAML files.
    include_path : str, optional
        Folder with tasks of one's own.
    metadata : dict
        Goes to tasks that make their data, like RULER's.

    Raises
    ------
    InvalidRequestError
        If a name is not known.
    TailReplayError
        If a task's data cannot be had.
    """
    if include_path is not None and not Path(include_path).is_dir():
        raise InvalidRequestError(f"There is no folder '{include_path}' with tasks.", "include_path")
    manager = TaskManager(include_path=include_path, metadata=metadata)
    known = [name for given in names for name in _known(manager, given)]
    # As the harness does before it loads tasks: the same samples are made.
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    tasks: dict[str, Task] = {}
    for name in dict.fromkeys(known):
        # Some tasks print how they search for their samples' length.
        with _load_errors(name), contextlib.redirect_stdout(io.StringIO()):
            tasks.update(manager.load([name])["tasks"])
    return LoadedTasks(manager, tasks)


def _known(manager: TaskManager, name: str) -> list[str]:
    found: list[str] = manager.match_tasks([name])
    if found or Path(name).is_file():
        return found or [name]
    close = difflib.get_close_matches(name, manager.all_tasks, 3)
    hint = f" (is it {' or '.join(close)}?)" if close else ""
    raise InvalidRequestError(f"There is no task '{name}'{hint}.", "tasks")


@contextlib.contextmanager
def _load_errors(name: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise TailReplayError(
            f"Task '{name}' needs packages that are not installed: pip install 'tailreplay[eval]'."
        ) from error
    except (OSError, httpx.HTTPError, DatasetsError, ValueError, LookupError, ArithmeticError, AssertionError) as error:
        reason = (str(error).strip() or type(error).__name__).split("\n")[0].rstrip(".")
        if any(isinstance(cause, _UNREACHABLE) for cause in _causes(error)):
            raise TailReplayError(
                f"The data of task '{name}' could not be fetched, is the hub reachable? ({reason})"
            ) from error
        raise TailReplayError(f"Task '{name}' could not be loaded: {reason}.") from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
