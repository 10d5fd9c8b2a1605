"""The exported folder loads unchanged, and answers as the trainer's model does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from training.card import GOALS, verdict, write_card
from training.evaluate import ASKED, LOSSES
from training.export import DTYPES, export
from training.model import Hybrid
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3_5ForCausalLM

from tailreplay import HybridLM, PrefixCache


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_library_loads_it_and_has_our_logits(model: Hybrid, data: Path, tmp_path: Path, dtype: str) -> None:
    export(model, data / "tokenizer.json", tmp_path, dtype)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
    assert type(loaded) is Qwen3_5ForCausalLM
    assert loaded.dtype == DTYPES[dtype]
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ids = torch.randint(2, 600, (1, 50))
    with torch.no_grad():
        ours = model.logits(ids)
        theirs = loaded(ids, use_cache=False).logits[0].float()
    assert (ours - theirs).norm() < (1e-4 if dtype == "float32" else 0.05) * ours.norm()
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Qwen3_5ForCausalLM"]
    assert GenerationConfig.from_pretrained(tmp_path).stop_strings == ["\n"]


def test_the_tokenizer_renders_chats(model: Hybrid, data: Path, tmp_path: Path) -> None:
    export(model, data / "tokenizer.json", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.eos_token_id == 0
    assert tokenizer.pad_token_id == 1
    chat = [{"role": "user", "content": "A text.\nQuestion: What?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert prompt == "A text.\nQuestion: What?\nAnswer: "
    grown = [*chat, {"role": "assistant", "content": "123"}, {"role": "user", "content": "Question: More?"}]
    assert tokenizer.apply_chat_template(grown, tokenize=False).startswith(prompt + "123\n")


def test_our_own_engine_generates_with_it(model: Hybrid, data: Path, tmp_path: Path) -> None:
    export(model, data / "tokenizer.json", tmp_path)
    lm = HybridLM.from_pretrained(tmp_path, cache=PrefixCache("16MiB"), device="cpu")
    prompt = "The old mill is near the river. " * 8 + "Question: What?\nAnswer: "
    lm.generate(prompt, max_new_tokens=1)
    assert lm.generate(prompt, max_new_tokens=2, replay="exact").reuse.matched > 0


def test_the_card_tells_what_was_not_reached(tmp_path: Path) -> None:
    lengths = ("1024", "2048", "4096")
    exact = {task: dict.fromkeys(lengths, 1.0) for task in ASKED}
    exact["count"]["2048"] = 0.5
    losses = {loss.name: 0.0 for loss in LOSSES} | {"full": 1.0}
    text = {"1024": {loss.name: (3.0, 3.0) for loss in LOSSES} | {"zero states": (4.0, 3.1)}}
    table = {"exact": {task: {"1024": losses} for task in ASKED}, "text": text}
    assert all(line.startswith("ok") for line in verdict(table))
    keeps = losses | {"KV wiped": 0.9}
    bad = {"exact": {"keys": {"1024": keeps}}, "text": {}}
    assert verdict(bad)[0].startswith("NOT")
    about = {"layers": "12 layers", "parameters": 4_000_000, "tokens": 1_000_000, "minutes": 10.0, "ranks": 2}
    results = {"samples": 40, "exact": exact, "text": dict.fromkeys(lengths, (3.0, 3.0))}
    write_card(tmp_path / "README.md", results, table, about)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "count at 2048 tokens: 0.50" in card
    assert "| needle | 1.00" in card
    assert "not measured" not in card
    del exact["needle"]["4096"]
    write_card(tmp_path / "README.md", results, table, about)
    assert "needle at 4096 tokens: not measured" in (tmp_path / "README.md").read_text(encoding="utf-8")
    assert ("needle", 4096) in GOALS
