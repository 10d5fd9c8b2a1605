"""What a run measures, checked before any model is loaded."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tailreplay.engines.transformers.describe import text_config
from tailreplay.engines.transformers.devices import usable_device
from tailreplay.engines.transformers.families.registry import family_of
from tailreplay.errors import InvalidRequestError, UnsupportedModelError
from tailreplay.evals.material import Material, python_topics, text_file
from tailreplay.evals.methods import EXACT, Method, parse_methods
from tailreplay.evals.start_rules import ANCHOR_INTERVAL, check_distance
from tailreplay.evals.tasks.base import VERSION, Task
from tailreplay.evals.tasks.registry import tasks_named
from tailreplay.sizes import parse_bytes
from tailreplay.storage import CODECS

SHORTEST = 1024
CHARACTERS = 4  # of text a token, so that a document does not repeat itself
DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass(frozen=True)
class EvalPlan:
    """The run, in plain data, so that worker processes can be handed it.

    Attributes
    ----------
    model : str
        Folder, hub id or "bundled".
    tasks, methods : tuple of str
    lengths : tuple of int
        Tokens, question and answer included.
    samples : int
        Questions a cell, at least.
    min_tail : int
        Shortest tail of "replay".
    text : str or None
        A file with prose.
    host_bytes, batch_bytes : str
    codec : str
        In which the cache holds hiddens (see `tailreplay.codecs`); "exact" asks for "none".
    anchor_interval : int
        Tokens between anchors, for methods that start from one and do not name another place.
    hits : int
        Of a document, at most, spread over it; 0 for all. Few hits of many documents say more than many of few.
    """

    model: str
    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    lengths: tuple[int, ...]
    samples: int = 500
    seed: int = 0
    dtype: str = "auto"
    device: str | None = None
    min_tail: int = 0
    text: str | None = None
    host_bytes: str = "4GiB"
    batch_bytes: str = "512MiB"
    codec: str = "none"
    anchor_interval: int = ANCHOR_INTERVAL
    hits: int = 0

    def chosen_tasks(self) -> list[Task]:
        """Return the tasks."""
        return tasks_named(list(self.tasks))

    def chosen_methods(self) -> list[Method]:
        """Return the methods, with those that every table needs."""
        return parse_methods(list(self.methods), self.min_tail, self.anchor_interval)

    def material(self) -> Material:
        """Return the text that documents are made of."""
        return python_topics() if self.text is None else text_file(Path(self.text))

    def cells(self) -> list[tuple[Task, int, int]]:
        """Return each task and length with the documents that it takes."""
        return [
            (task, length, math.ceil(self.samples / (min(task.probes, self.hits) if self.hits else task.probes)))
            for length in self.lengths
            for task in self.chosen_tasks()
        ]

    def check(self) -> None:
        """Refuse what cannot be run, without reading weights.

        Raises
        ------
        InvalidRequestError
            For an unknown task or method, a ratio outside (0, 1], a bad number or text, or a length out of range.
        UnsupportedModelError
            If there is no such model, or it has no linear layers, so that there is nothing to measure.
        """
        if not self.chosen_tasks():
            raise InvalidRequestError("There is no task to measure.")
        check_distance(self.anchor_interval)
        self.chosen_methods()
        if self.samples < 1 or self.min_tail < 0 or self.hits < 0:
            raise InvalidRequestError("--samples must be at least 1, --min-tail and --hits at least 0.")
        for size in (self.host_bytes, self.batch_bytes):
            parse_bytes(size)
        if self.codec not in CODECS:
            raise InvalidRequestError(f"'{self.codec}' is not a codec: {', '.join(CODECS)}.")
        if self.codec != "none" and EXACT in self.methods:
            raise InvalidRequestError(f"'{EXACT}' takes no page in a lossy codec: leave one of them out.")
        if min(self.lengths) < SHORTEST:
            raise InvalidRequestError(f"A length must be at least {SHORTEST} tokens, got {min(self.lengths)}.")
        if self.dtype not in DTYPES:
            raise InvalidRequestError(f"'{self.dtype}' is not a dtype for models: {', '.join(DTYPES)}.")
        self._check_model()
        usable_device(self.device)
        material = self.material()
        if material.characters < CHARACTERS * max(self.lengths):
            raise InvalidRequestError(
                f"{material.name} has {material.characters} characters, too few for documents of "
                f"{max(self.lengths)} tokens: give a longer text with --text."
            )

    def _has_anchors(self) -> bool:
        return any(method.start and method.start.anchored for method in self.chosen_methods())

    def _check_model(self) -> None:
        config = text_config(self.model)
        if not family_of(config).topology(config).is_hybrid:
            raise UnsupportedModelError(f"'{self.model}' has no linear layers: every hit is exact.")
        longest = getattr(config, "max_position_embeddings", None)
        if longest is not None and max(self.lengths) > longest:
            raise InvalidRequestError(
                f"'{self.model}' takes {longest} tokens at most, got a length of {max(self.lengths)}."
            )

    def settings(self, fingerprint: str, dtype: str) -> dict[str, Any]:
        """Return what the numbers depend on: records of other settings must not be mixed with these.

        Parameters
        ----------
        fingerprint, dtype : str
            Of the model's weights.
        """
        material = self.material()
        return {
            "model": self.model,
            "weights": fingerprint[:16],
            "dtype": dtype,
            "device": usable_device(self.device).type,
            "versions": {name: version(name) for name in ("tailreplay", "torch", "transformers")},
            "tasks_version": VERSION,
            "methods": [method.name for method in self.chosen_methods()],
            "min_tail": self.min_tail,
            "seed": self.seed,
            "text": material.name,
            "text_digest": material.digest,
            # Only where it changes numbers: a folder of a run without it goes on.
            **({"codec": self.codec} if self.codec != "none" else {}),
            **({"hits": self.hits} if self.hits else {}),
            **({"anchor_interval": self.anchor_interval} if self._has_anchors() else {}),
        }


def default_workers(device: str | None, model: str) -> int:
    """Return how many processes to use: one a core for the small bundled model on a CPU, else one."""
    on_cpu = usable_device(device).type == "cpu"
    return min(4, os.cpu_count() or 1) if on_cpu and model == "bundled" else 1
