"""Writes a model folder that transformers and vLLM load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from training.corpus.tokens import END, PAD
from training.model import Hybrid

TEMPLATE = Path(__file__).with_name("chat_template.jinja")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def export(model: Hybrid, tokenizer: Path, out: Path, dtype: str = "bfloat16") -> None:
    """Write weights, config, tokenizer, chat template and generation config.

    Parameters
    ----------
    model : Hybrid
    tokenizer : Path
        ``tokenizer.json`` of the data folder.
    out : Path
        Made if need be; files of the same names are replaced.
    dtype : {"bfloat16", "float32"}
        Of the weights.
    """
    from transformers import PreTrainedTokenizerFast

    out.mkdir(parents=True, exist_ok=True)
    # The head is the embedding's: tied weights are stored once.
    weights = {name: p.detach().to(DTYPES[dtype]).contiguous() for name, p in model.parameters.items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    config = model.config
    config.architectures = ["Qwen3_5ForCausalLM"]
    config.dtype = dtype
    config.save_pretrained(out)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer), eos_token=END, pad_token=PAD, model_max_length=config.max_position_embeddings
    )
    wrapped.save_pretrained(out)
    (out / "chat_template.jinja").write_text(TEMPLATE.read_text(encoding="utf-8"), encoding="utf-8")
    _write(
        out / "generation_config.json",
        {"do_sample": False, "eos_token_id": 0, "pad_token_id": 1, "stop_strings": ["\n"]},
    )


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
