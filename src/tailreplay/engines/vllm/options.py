"""What each request may reuse and store."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from tailreplay.engines.vllm.settings import RequestOptions, Settings, parse_options
from tailreplay.errors import InvalidRequestError
from tailreplay.modes import Reuse

log = logging.getLogger("vllm.tailreplay")
_NO_REUSE = RequestOptions(Reuse("off", None), store=False)


class Options:
    """Reads them off vLLM's requests. Never raises: a raw vLLM server passes anything through.

    Parameters
    ----------
    counts : Counter
        Wrong ones are counted here; the first is logged too.
    """

    def __init__(self, settings: Settings, counts: Counter[str]) -> None:
        self._settings = settings
        self._counts = counts
        self._warned = False

    def of(self, request: Any) -> RequestOptions:
        """Return the options of a request; the operator's defaults for one that names none, or wrong ones."""
        if request.prompt_embeds is not None:
            return _NO_REUSE  # such a prompt has no token ids that tell it from others
        try:
            return parse_options((request.kv_transfer_params or {}).get("tailreplay"), self._settings)
        except InvalidRequestError as error:
            self._counts["bad_params"] += 1
            if not self._warned:
                log.warning(
                    "Ignoring a request's kv_transfer_params.tailreplay: %s (further ones are only counted)", error
                )
                self._warned = True
            return parse_options(None, self._settings)
