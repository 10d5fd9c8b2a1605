"""Where a model runs."""

from __future__ import annotations

import torch

from tailreplay.errors import UnsupportedModelError


def usable_device(device: str | torch.device | None) -> torch.device:
    """Return `device`, or CUDA if there is any, else CPU.

    Raises
    ------
    UnsupportedModelError
        If it cannot be used here.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0].split(" device type at")[0].rstrip(".")
        raise UnsupportedModelError(f"Device '{device}' cannot be used: {reason}.") from None
    return torch.device(device)
