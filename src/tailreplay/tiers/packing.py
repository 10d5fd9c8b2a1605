"""Between the arena's slots and a page's bytes outside it."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_64

from tailreplay.codecs import codec_of
from tailreplay.errors import CacheConfigError
from tailreplay.page_format import (
    ALIGNMENT,
    WHOLE,
    PageFormatError,
    PageHeader,
    PartEntry,
    TensorEntry,
    offsets,
    pack_header,
)
from tailreplay.pages import PartSpec
from tailreplay.tiers.base import HIDDEN, KV, Buffer, TierPage
from tailreplay.tiers.host import HostArena
from tailreplay.tiers.naming import PageRecord, hints_of, rank_key

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class WorsePageError(PageFormatError):
    """There is nothing wrong with the page, but it is not as good as the one that was looked up."""


class Packer:
    """Packs pages of one arena for tiers, and unpacks them. May be used by several threads.

    Parameters
    ----------
    hidden_codec, kv_codec : str
        In which to write what the arena holds without loss (see `tailreplay.codecs`); what it holds in a lossy codec is
        written as it is.
    rank : str
        Whose share of each page the arena holds.
    label : str
        Model name for people.

    Raises
    ------
    CacheConfigError
        If a codec is unknown or cannot hold a part.
    """

    def __init__(
        self, arena: HostArena, hidden_codec: str = "none", kv_codec: str = "none", rank: str = WHOLE, label: str = ""
    ) -> None:
        self._arena = arena
        self.rank = rank
        self._label = label
        layout = arena.layout
        self._specs: dict[str, tuple[PartSpec, ...]] = {
            KV: layout.kv_parts,
            HIDDEN: layout.hidden,
        }
        wanted = {KV: kv_codec, HIDDEN: hidden_codec}
        self._codecs = {
            part.name: _codec_for(part, wanted[name]) for name, each in self._specs.items() for part in each
        }
        lossy = {
            name: any(codec_of(self._codecs[part.name]).lossy for part in each) for name, each in self._specs.items()
        }
        self._lossy = lossy

    @property
    def arena_is_lossy(self) -> bool:
        """Whether host memory itself holds pages in a lossy codec."""
        return self._arena.layout.lossy

    def pack(self, record: PageRecord, slot: int, hidden_slot: int, check: bool = False) -> TierPage:
        """Return the page in the arena's slots as a tier takes it; views into the arena where nothing is encoded.

        Parameters
        ----------
        slot, hidden_slot : int
            -1 where that part is not there; it is left out.
        check : bool
            Compare with the checksums that `seal` noted first.

        Raises
        ------
        ValueError
            If a codec cannot hold the numbers (they are not finite), or they are not what was stored: then the page must
            not be written.
        """
        entries: dict[str, PartEntry] = {}
        buffers: dict[str, list[Buffer]] = {}
        lossy = record.provenance.lossy
        for name, at in ((KV, slot), (HIDDEN, hidden_slot)):
            if at >= 0 and self._specs[name]:
                if check and self._arena.is_damaged(self._specs[name], at):
                    # A checksum of what is wrong already would make it right for everybody.
                    raise ValueError("a page in host memory is not what was stored")
                entries[name], buffers[name] = self._pack_part(self._specs[name], at, record.tokens)
                lossy = lossy or self._lossy[name]
        header = PageHeader(
            record.key,
            record.parent,
            record.namespace,
            record.tenant,
            record.start,
            record.ids,
            record.provenance._replace(lossy=lossy),
            entries,
            self.rank,
            self._label,
            time.time(),
            record.gates,
        )
        hints = hints_of(record, self._arena.layout.page_size, self.rank)
        return TierPage(rank_key(record.key, self.rank), pack_header(header), buffers, hints, record.tenant)

    def check(self, header: PageHeader, record: PageRecord) -> None:
        """Raise `PageFormatError` unless `header` speaks of just this page, in shapes that the arena can take.

        `WorsePageError` if it has been replaced by a worse one since it was looked up.
        """
        same = (
            header.key == record.key
            and header.parent == record.parent
            and header.namespace == record.namespace
            and header.ids == record.ids
            and header.rank == self.rank
        )
        if not same:
            raise PageFormatError("The page under this name is another one.")
        for name, part in header.parts.items():
            self._check_part(name, part, header.tokens)
        if header.provenance.depth > record.provenance.depth or (
            header.provenance.lossy and not record.provenance.lossy
        ):
            raise WorsePageError("The page is of worse provenance than was looked up.")

    def unpack(self, part: str, entry: PartEntry, data: memoryview, slot: int) -> None:
        """Write a part, checked by `check` and its checksum, into a slot. Mutates the arena."""
        begins, _ = offsets(entry.tensors)
        whole = _bytes_of(data)
        for spec, tensor, begin in zip(self._specs[part], entry.tensors, begins, strict=True):
            coded = whole[begin : begin + tensor.rows * tensor.token_bytes].view(tensor.rows, tensor.token_bytes)
            if tensor.codec == spec.codec:
                self._arena.rows(spec, slot, tensor.rows).copy_(coded)
                continue
            plain = torch.empty((tensor.rows, *spec.shape), dtype=spec.dtype)
            codec_of(tensor.codec).decode(coded, plain)
            self._arena.write(spec, [slot], plain)

    def seal(self, part: str, slot: int, tokens: int) -> None:
        """Note checksums of what a slot holds (see `HostArena.seal`)."""
        for spec in self._specs[part]:
            self._arena.seal(spec, slot, self._rows(spec, tokens))

    def _rows(self, spec: PartSpec, tokens: int) -> int:
        return self._arena.layout.page_size if spec.whole else tokens

    def _pack_part(self, specs: Sequence[PartSpec], slot: int, tokens: int) -> tuple[PartEntry, list[Buffer]]:
        tensors: list[TensorEntry] = []
        buffers: list[Buffer] = []
        checksum = xxh3_64()
        size = 0
        for spec in specs:
            rows = self._rows(spec, tokens)
            codec = self._codecs[spec.name]
            coded = self._arena.rows(spec, slot, rows)
            if codec != spec.codec:
                plain = coded.view(spec.dtype).view(rows, *spec.shape)
                coded = torch.empty(rows, codec_of(codec).token_bytes(spec.shape, spec.dtype), dtype=torch.uint8)
                codec_of(codec).encode(plain, coded)
            dtype = str(spec.dtype).removeprefix("torch.")
            tensors.append(TensorEntry(spec.name, spec.shape, dtype, codec, coded.shape[1], rows))
            data: Any = coded.numpy()
            for buffer in (memoryview(data).cast("B"), bytes(-coded.numel() % ALIGNMENT)):
                if len(buffer):
                    buffers.append(buffer)
                    checksum.update(buffer)
                    size += len(buffer)
        return PartEntry(tuple(tensors), size, checksum.intdigest()), buffers

    def _check_part(self, name: str, part: PartEntry, tokens: int) -> None:
        specs = self._specs.get(name, ())
        if len(specs) != len(part.tensors) or offsets(part.tensors)[1] != part.nbytes:
            raise PageFormatError(f"Part '{name}' of the page has other tensors than this model's.")
        for spec, tensor in zip(specs, part.tensors, strict=True):
            same = (tensor.name, tensor.shape, tensor.rows) == (spec.name, spec.shape, self._rows(spec, tokens))
            if not same or _DTYPES.get(tensor.dtype) is not spec.dtype:
                raise PageFormatError(f"Tensor '{tensor.name}' of the page is not this model's '{spec.name}'.")
            try:
                token_bytes = codec_of(tensor.codec).token_bytes(spec.shape, spec.dtype)
            except CacheConfigError as error:
                raise PageFormatError(f"Tensor '{tensor.name}' of the page cannot be decoded: {error}") from error
            if token_bytes != tensor.token_bytes:
                raise PageFormatError(f"Tensor '{tensor.name}' of the page has another size than its codec says.")


def _codec_for(part: PartSpec, wanted: str) -> str:
    if part.codec != "none":
        return part.codec
    # Where only the kernels know how tokens lie, blocks of channels mean nothing.
    codec = "none" if part.whole else wanted
    codec_of(codec).token_bytes(part.shape, part.dtype)
    return codec


def _bytes_of(data: memoryview) -> torch.Tensor:
    """Return a tensor over `data`, which must outlive it and is only read: torch warns of memory that is read-only."""
    address = np.frombuffer(data, dtype=np.uint8).ctypes.data
    writable: Any = (ctypes.c_char * data.nbytes).from_address(address)
    return torch.from_numpy(np.frombuffer(writable, dtype=np.uint8))
