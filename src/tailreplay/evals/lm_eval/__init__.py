"""lm-evaluation-harness integration. Importing this package registers the model ``tailreplay``."""

from tailreplay.evals.lm_eval.model import TailReplayLM

__all__ = ["TailReplayLM"]
