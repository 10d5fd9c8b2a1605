"""The bundled model, and requests as the harness makes them. Its answers are only ever compared with its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance

from tailreplay import HybridLM, PrefixCache

Plain = Callable[[list[int], int], str]


@pytest.fixture(scope="session")
def hybrid() -> HybridLM:
    """The bundled model, in float32: rounding in bfloat16 may decide between words that it likes as much."""
    return HybridLM.from_pretrained("bundled", cache=PrefixCache("64MiB"), dtype="float32")


@pytest.fixture(scope="session")
def plain(hybrid: HybridLM) -> Plain:
    """The library's own greedy answer to token ids."""

    def answer(ids: list[int], tokens: int) -> str:
        prompt = torch.tensor([ids])
        out = hybrid.model.generate(prompt, max_new_tokens=tokens, do_sample=False, stop_strings=None)
        return str(hybrid.tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True))

    return answer


@pytest.fixture
def computed(hybrid: HybridLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the runs of tokens that the model computes from now on."""
    lengths: list[int] = []
    forward = hybrid.backbone.forward

    def counted(ids: list[int], *arguments: Any, **more: Any) -> torch.Tensor:
        lengths.append(len(ids))
        return forward(ids, *arguments, **more)

    monkeypatch.setattr(hybrid.backbone, "forward", counted)
    return lengths


def request(kind: str, *arguments: Any, task: str = "some_task", doc: dict[str, Any] | None = None) -> Instance:
    """Return a request of the harness."""
    return Instance(kind, doc or {}, arguments, 0, (task, 0, 1))  # type: ignore[arg-type]


def generation(text: str, tokens: int = 8, until: list[str] | None = None, **more: Any) -> Instance:
    """Return a request for an answer."""
    return request("generate_until", text, {"until": until or [], "max_gen_toks": tokens}, **more)
