"""Keep the library's notices out of a command's output."""

from __future__ import annotations

import os
import sys


def quiet_library() -> None:
    """Silence the library's warnings about optional kernels, and its progress bars where nobody watches.

    Call it before a model is loaded.
    """
    watched = sys.stderr.isatty()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not watched:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from transformers.utils import logging

    logging.set_verbosity_error()
    if not watched:
        logging.disable_progress_bar()
