"""Keep the library's notices out of a command's output."""

from __future__ import annotations

import os


def quiet_library() -> None:
    """Silence transformers' warnings and progress bars (missing optional kernels, weight loading). Call before loading."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
