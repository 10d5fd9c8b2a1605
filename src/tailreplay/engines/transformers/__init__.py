"""The transformers engine: capture, replay and generation on Hugging Face models."""

import os
import sys

from tailreplay import torchvision_shim

if "torch" not in sys.modules:
    # Read when torch loads its OpenMP: idle threads that spin make a busy machine of few cores many times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
# Before the library is imported: it imports torchvision where there is one, usable or not.
torchvision_shim.install()

from tailreplay.engines.transformers.lm import HybridLM  # noqa: E402
from tailreplay.engines.transformers.results import GenerationResult, ReuseReport, Timings  # noqa: E402
from tailreplay.loading import model_path  # noqa: E402

__all__ = ["GenerationResult", "HybridLM", "ReuseReport", "Timings", "model_path"]
