"""How many tokens a second one thread trains on, by sequence length."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from training.initial import initialise
from training.loop import flat_gradients
from training.model import Hybrid, library_model
from training.optimiser import Optimiser
from training.settings import Settings

_TOKENS, _REPEATS = 4096, 4


def measure(settings: Settings, clock: tuple[Callable[[], float], ...]) -> dict[int, list[float]]:
    """Return the best of a few whole steps (forward, backward, optimiser), in tokens a second by each clock.

    Parameters
    ----------
    settings : Settings
    clock : tuple of callables
        Each returns seconds.
    """
    library = library_model(settings.model)
    initialise(library, settings.model, 0)
    model = Hybrid(library, torch.bfloat16)
    optimiser = Optimiser(model.parameters, settings.optimiser)
    gradients = flat_gradients(model)
    out = {}
    for length in (256, 1024, 4096):
        ids = torch.randint(0, settings.model.vocabulary, (_TOKENS // length, length))
        times = []
        for _ in range(_REPEATS):
            began = [now() for now in clock]
            F.cross_entropy(model.logits(ids), ids.flatten()).backward()
            optimiser.step(0.0)
            gradients.zero_()
            times.append([now() - start for now, start in zip(clock, began, strict=True)])
        out[length] = [_TOKENS / min(column) for column in zip(*times, strict=True)]
    return out
