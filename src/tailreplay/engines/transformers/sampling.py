"""How the next token is chosen, through the library's own logits processors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tailreplay.errors import InvalidRequestError

# Dividing logits by less overflows, and the best token has all the probability long before that.
_GREEDY_BELOW = 1e-5


@dataclass(frozen=True)
class Sampling:
    """Settings of one generation.

    Attributes
    ----------
    max_new_tokens : int
        At least 1.
    temperature : float
        0 is greedy.
    top_p, top_k : float, int
        1.0 and 0 (or -1) switch them off.
    seed : int or None
        Of this generation's own random generator.
    stop : tuple of str
        Strings that end the answer and are not part of it.
    ignore_eos : bool
        Go on after the model's end tokens, for load tests.

    Raises
    ------
    InvalidRequestError
        If a setting is out of range.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check(self.max_new_tokens >= 1, "max_tokens", f"must be at least 1, got {self.max_new_tokens}")
        _check(self.temperature >= 0, "temperature", f"must not be negative, got {self.temperature}")
        _check(0 < self.top_p <= 1, "top_p", f"must be in (0, 1], got {self.top_p}")
        _check(self.seed is None or abs(self.seed) < 1 << 63, "seed", f"must fit 64 bits, got {self.seed}")
        _check(self.top_k >= -1, "top_k", f"must be at least 0, or -1 for off, got {self.top_k}")


def _check(valid: bool, param: str, problem: str) -> None:
    if not valid:
        raise InvalidRequestError(f"{param} {problem}.", param)


def sampling_from(config: GenerationConfig | None, **given: Any) -> Sampling:
    """Fill what a request leaves open (None) from the model's generation config, then from `Sampling`'s defaults."""
    values = {key: value for key, value in given.items() if value is not None}
    if config is not None:
        if getattr(config, "do_sample", False):
            for name in ("temperature", "top_p", "top_k"):
                values.setdefault(name, getattr(config, name, None))
        values.setdefault("stop", getattr(config, "stop_strings", None))
    values = {key: value for key, value in values.items() if value is not None}
    stop = values.get("stop", ())
    values["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    return Sampling(**values)


class Sampler:
    """Chooses tokens for one generation.

    Parameters
    ----------
    device : torch.device
        Of the logits.
    """

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self._greedy = sampling.temperature < _GREEDY_BELOW
        self._processors = LogitsProcessorList()
        self._generator = torch.Generator(device)
        if sampling.seed is not None:
            self._generator.manual_seed(sampling.seed)
        else:
            self._generator.seed()
        if not self._greedy:
            self._processors.append(TemperatureLogitsWarper(float(sampling.temperature)))
            if sampling.top_k > 0:
                self._processors.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1:
                self._processors.append(TopPLogitsWarper(float(sampling.top_p)))

    @torch.inference_mode()
    def __call__(self, logits: torch.Tensor) -> int:
        """Return the next token for logits of shape ``(vocabulary,)``."""
        if self._greedy:
            return int(logits.argmax())
        # These processors look at the scores alone, so the ids they are handed do not matter.
        scores = self._processors(torch.zeros((1, 1), dtype=torch.long, device=logits.device), logits.float()[None])
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))
