"""What is changed of vLLM's requests."""

from __future__ import annotations

from itertools import count
from typing import Any

_numbers = count()


def isolate(request: Any) -> None:
    """Let nothing that `request` computes be found through vLLM's own prefix cache. Mutates the request.

    Its blocks get names that no other request has, as if it had a secret `cache_salt` of its own. Call it before the
    blocks are published; blocks that the request shares already keep their names.
    """
    request.cache_salt = f"{request.cache_salt or ''}/tailreplay-{next(_numbers)}"
    request.block_hashes = []
    request.update_block_hashes()
