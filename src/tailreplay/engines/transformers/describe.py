"""A model's groups, bytes and operations from its config alone, without weights."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from tailreplay.engines.transformers.backbone import Backbone
from tailreplay.engines.transformers.families.registry import family_of
from tailreplay.loading import load_errors, model_path


def text_config(model: str | os.PathLike[str], **kwargs: Any) -> PretrainedConfig:
    """Return the text config of "bundled", a folder or a hub id, checked to be of a supported family.

    Raises
    ------
    UnsupportedModelError
        If it cannot be loaded, or the model not replayed.
    """
    return _checked(model, **kwargs).get_text_config(decoder=True)


def describe(model: str | os.PathLike[str], dtype: torch.dtype | None = None, **kwargs: Any) -> Backbone:
    """Build a backbone on the meta device: real shapes, no memory, no weights.

    Parameters
    ----------
    model : str
        "bundled", a folder with a config.json, or a hub id.
    dtype : torch.dtype, optional
        The config's own if not given.

    Raises
    ------
    UnsupportedModelError
        If the model cannot be loaded or replayed.
    """
    return describe_config(_checked(model, **kwargs), dtype)


def describe_config(config: PretrainedConfig, dtype: torch.dtype | None = None) -> Backbone:
    """Do what `describe` does, from a config that is there already."""
    text = config.get_text_config(decoder=True)
    chosen = dtype or getattr(config, "dtype", None) or getattr(text, "dtype", None) or torch.float32
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, dtype=chosen)
    if hasattr(skeleton, "set_experts_implementation"):
        # The default, a grouped matrix product, has no meta kernel for float32.
        skeleton.set_experts_implementation("batched_mm")
    return Backbone(skeleton.eval())


def _checked(model: str | os.PathLike[str], **kwargs: Any) -> PretrainedConfig:
    """Read a config, and refuse a family that cannot be replayed before anything is built."""
    with load_errors(model):
        config = AutoConfig.from_pretrained(model_path(model), **kwargs)
    family_of(config.get_text_config(decoder=True))
    return config
