"""Telling two models' files apart without reading all of them."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

from blake3 import blake3

log = logging.getLogger("tailreplay")
_PIECES, _PIECE_BYTES = 256, 16384
_SUFFIXES = {".safetensors", ".bin", ".pt", ".gguf", ".json"}


def weights_stamp(model: str, revision: str | None = None) -> str:
    """Return a hex name of a model's weight and config files: their sizes and 256 pieces of each, spread evenly.

    Training changes every tensor, so other weights under the same name are told apart; an edit of a few bytes by hand may
    not be.

    Parameters
    ----------
    model : str
        A folder, or a hub id whose files have been downloaded.

    Returns
    -------
    str
        A name that nothing else will ever have, with a warning, if the files cannot be found: then nothing that is stored
        is found again, which is better than the pages of other weights.
    """
    folder = _folder_of(model, revision)
    files = sorted(path for path in folder.rglob("*") if path.suffix in _SUFFIXES) if folder is not None else []
    if not files or folder is None:
        log.warning("The files of '%s' are not found, so pages stored now will not be found by the next start.", model)
        return f"unknown-{secrets.token_hex(16)}"
    hasher = blake3()
    for path in files:
        hasher.update(repr((path.relative_to(folder).as_posix(), path.stat().st_size)).encode())
        _add_pieces(hasher, path)
    digest: str = hasher.hexdigest()
    return digest


def _folder_of(model: str, revision: str | None) -> Path | None:
    if os.path.isdir(model):
        return Path(model)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except Exception:  # not downloaded, no such id, no library: all the same here
        return None


def _add_pieces(hasher: blake3, path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        for index in range(_PIECES):
            at = index * size // _PIECES
            file.seek(at)
            hasher.update(file.read(min(_PIECE_BYTES, (index + 1) * size // _PIECES - at)))
