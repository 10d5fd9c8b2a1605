"""Saved states in host memory: as they were, or coded; and how much memory they take."""

from __future__ import annotations

import pytest
import torch

from tailreplay import CacheConfigError
from tailreplay.pages import PageLayout, PartSpec
from tailreplay.sizes import parse_bytes
from tailreplay.storage import Storage
from tailreplay.tiers.anchor_arena import AnchorArena

PARTS = (
    PartSpec("c0", (6, 3), torch.bfloat16),
    PartSpec("s0", (2, 8, 4), torch.float32),
    PartSpec("s1", (3, 5, 1), torch.float32),
)


def layout(codec: str) -> PageLayout:
    return PageLayout(16, (), (), PARTS).with_codecs(anchor=codec)


def states(seed: int, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(scale * torch.randn(part.shape, generator=generator)).to(part.dtype) for part in PARTS]


def back(arena: AnchorArena, slot: int) -> list[torch.Tensor]:
    out = [torch.full(part.shape, 7.0, dtype=part.dtype) for part in PARTS]
    arena.read(slot, out)
    return out


@pytest.mark.parametrize("codec", ["none", "bf16", "int8"])
def test_what_was_written_is_read(codec: str) -> None:
    arena = AnchorArena(layout(codec).anchor, 3)
    for slot in range(3):
        arena.write(slot, states(slot))
    for slot in range(3):
        for part, got, want in zip(arena.parts, back(arena, slot), states(slot), strict=True):
            if not part.lossy:
                assert torch.equal(got, want)
            # A head's own largest value says how coarse it is held.
            step = want.abs().amax(dim=tuple(range(1, want.dim())), keepdim=True) / (127 if codec == "int8" else 128)
            assert bool(((got.float() - want.float()).abs() <= 0.51 * step.float()).all())
    assert layout(codec).anchor[0].codec == "none", "convolutions are not worth a codec"


def test_a_head_that_has_decayed_to_almost_nothing_is_held_by_its_own_scale() -> None:
    arena = AnchorArena(layout("int8").anchor, 1)
    held = states(0)
    held[1][1] *= 1e-20
    held[2][2] = 0.0
    arena.write(0, held)
    got = back(arena, 0)
    assert float((got[1][1] - held[1][1]).norm() / held[1][1].norm()) < 0.01
    assert torch.equal(got[2][2], held[2][2])


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_states_that_are_not_finite_are_refused(codec: str) -> None:
    arena = AnchorArena(layout(codec).anchor, 1)
    wrong = states(0)
    wrong[1][0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="finite"):
        arena.write(0, wrong)


def test_other_shapes_are_refused_and_damage_is_seen() -> None:
    arena = AnchorArena(layout("none").anchor, 2)
    with pytest.raises(ValueError, match="c0"):
        arena.write(0, [torch.zeros(6, 4, dtype=torch.bfloat16), *states(0)[1:]])
    arena.write(1, states(1))
    assert not arena.is_damaged(1)
    arena._arena._block[-1] += 1
    assert arena.is_damaged(1)


def test_codecs_save_bytes() -> None:
    sizes = [layout(codec).anchor_bytes for codec in ("none", "bf16", "int8")]
    assert sizes == [36 + 4 * 64 + 4 * 15, 36 + 2 * 64 + 2 * 15, 36 + (64 + 8) + (16 + 12)]


# ---- room


def test_anchors_have_a_limit_of_their_own_within_the_cache_s() -> None:
    page, anchor = 1000, 3000
    storage = Storage(anchor_bytes="10KB")
    catalog = storage.catalog(16, 100_000, page, 400, anchor_bytes=anchor)
    assert catalog.anchors.slots == 3
    assert catalog.slots * page + 3 * anchor <= 100_000
    assert Storage().catalog(16, 100_000, page, 400, anchor_bytes=anchor).anchors.slots == 100_000 // 8 // anchor
    for nothing in (0, "0"):
        assert Storage(anchor_bytes=nothing).catalog(16, 100_000, page, 400, anchor_bytes=anchor).slots == 100
    # Too small a cache for an eighth to hold one keeps all for pages, and a model without states has no anchors.
    assert Storage().catalog(16, 20_000, page, 400, anchor_bytes=anchor).slots == 20
    assert Storage().catalog(16, 100_000, page, 400).anchors.slots == 0


@pytest.mark.parametrize(
    ("size", "said"),
    [("2KB", "less than one"), ("99500B", "leave no room for pages"), ("much", "not a size"), (-5, "must be positive")],
)
def test_a_limit_that_makes_no_sense_gets_one_sentence(size: int | str, said: str) -> None:
    with pytest.raises(CacheConfigError, match=said):
        Storage(anchor_bytes=size).catalog(16, 100_000, 1000, 400, anchor_bytes=3000)


def test_an_unknown_codec_gets_one_sentence() -> None:
    with pytest.raises(CacheConfigError, match="anchor_codec"):
        Storage(anchor_codec="fp4")


def test_tenants_shares_cover_anchors() -> None:
    storage = Storage(anchor_bytes="20KB", limits={"alice": "50KB"})
    catalog = storage.catalog(16, 100_000, 1000, 400, anchor_bytes=2000)
    (limit,) = catalog.quotas.limits.values()
    assert limit == 50_000 * (100_000 - 20_000) // 100_000
    assert parse_bytes("20KB") == 20_000
