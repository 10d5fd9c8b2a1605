"""The transformers engine: capture, replay and generation on Hugging Face models."""

from tailreplay.engines.transformers.lm import HybridLM
from tailreplay.engines.transformers.loading import model_path
from tailreplay.engines.transformers.results import GenerationResult, ReuseReport, Timings

__all__ = ["GenerationResult", "HybridLM", "ReuseReport", "Timings", "model_path"]
