"""Codecs: what comes back, how far off it is, and what is refused."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tailreplay import CacheConfigError, naive_codecs
from tailreplay.codec_room import BLOCK
from tailreplay.codecs import CODECS, Codec, codec_of

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1,), (100,), (128,), (129,), (2560,), (2, 64), ()]
LOSSY = [name for name in CODECS if codec_of(name).lossy]
TOP = {"int8": 127.0, "fp8_e4m3": 448.0}


def coded_by(codec: Codec, rows: torch.Tensor) -> torch.Tensor:
    out = torch.empty(rows.shape[0], codec.token_bytes(tuple(rows.shape[1:]), rows.dtype), dtype=torch.uint8)
    codec.encode(rows, out)
    return out


def decoded(codec: Codec, coded: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    out = torch.full((coded.shape[0], *like.shape[1:]), 77, dtype=like.dtype)
    codec.decode(coded, out)
    return out


def gaussian(tokens: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, *shape, generator=generator).to(dtype)


def scales_of(coded: torch.Tensor, channels: int) -> torch.Tensor:
    """Scales by channel, float64 ``(n, channels)``."""
    scales = coded[:, channels + channels % 2 :].contiguous().view(torch.float16).double()
    return scales.repeat_interleave(BLOCK, -1)[:, :channels]


def check_error(name: str, rows: torch.Tensor, coded: torch.Tensor, back: torch.Tensor) -> None:
    """Check that each channel is as near as its scale allows, but for rounding to the dtype."""
    true, got = (tensor.unsqueeze(-1).flatten(1).double() for tensor in (rows, back))
    scale = scales_of(coded, true.shape[1])
    if name == "int8":
        allowed = scale / 2 * (1 + 2**-10)
    else:
        # Half of the last of 4 significant bits, or half of the smallest code.
        allowed = torch.maximum(true.abs() * 2**-4, scale * 2**-10) * (1 + 2**-10)
    unit = torch.finfo(rows.dtype)
    allowed = allowed + (true.abs() + allowed) * unit.eps / 2 + unit.smallest_normal * unit.eps / 2
    assert bool(((true - got).abs() <= allowed).all())


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_come_back_as_near_as_scales_allow(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    codec, rows = codec_of(name), gaussian(70, shape, dtype)
    coded = coded_by(codec, rows)
    assert coded.shape[1] % 2 == 0
    check_error(name, rows, coded, decoded(codec, coded, rows))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("shape", SHAPES)
def test_none_keeps_every_bit_of_any_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    size = gaussian(9, shape, torch.float32).numel() * dtype.itemsize
    rows = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8).view(dtype).view(9, *shape)
    back = decoded(codec_of("none"), coded_by(codec_of("none"), rows), rows)
    assert torch.equal(back.reshape(9, -1).view(torch.uint8), rows.reshape(9, -1).view(torch.uint8))


@pytest.mark.parametrize("shape", [(129,), (2560,), (2, 64)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_int8_equals_the_oracle(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    rows = gaussian(3, shape, dtype) * torch.tensor([1e-4, 1.0, 3e3], dtype=dtype).view(3, *[1] * len(shape))
    coded = coded_by(codec_of("int8"), rows)
    back = decoded(codec_of("int8"), coded, rows).float()
    for token, row, got in zip(rows.view(3, -1).double().numpy(), coded, back.view(3, -1).numpy(), strict=True):
        channels = len(token)
        scales = row[channels + channels % 2 :].clone().view(torch.float16).double().numpy()
        assert all(a <= s <= b for s, (a, b) in zip(scales, naive_codecs.int8_scale_range(token), strict=True))
        codes = row[:channels].view(torch.int8).numpy()
        expected = naive_codecs.int8_codes(token, scales)
        by_channel = scales.repeat(BLOCK)[:channels]
        # float32 quotients may fall on the other side of a tie.
        tie = np.abs(np.abs(token / by_channel) % 1 - 0.5) < 1e-4
        assert np.array_equal(codes[~tie], expected[~tie])
        assert np.abs(codes - expected).max() <= 1
        values = torch.from_numpy(naive_codecs.int8_values(codes.astype(np.int64), scales))
        assert torch.equal(torch.from_numpy(got), values.float().to(dtype).float())


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outliers_cost_their_own_block_only(name: str, dtype: torch.dtype) -> None:
    codec, plain = codec_of(name), gaussian(32, (1024,), dtype)
    rows = plain.clone()
    rows[:, [130, 200, 700]] *= 1000  # blocks 1 and 5
    clean = torch.tensor([0, 2, 3, 4, 6, 7])
    without, with_them = (decoded(codec, coded_by(codec, each), each).view(32, 8, BLOCK) for each in (plain, rows))
    assert torch.equal(with_them[:, clean], without[:, clean])
    others = torch.ones(1024, dtype=torch.bool)
    others[[130, 200, 700]] = False
    others = others.view(8, BLOCK)[[1, 5]].flatten()
    true = rows.view(32, 8, BLOCK)[:, [1, 5]].flatten(1)[:, others].double()
    error = (with_them[:, [1, 5]].flatten(1)[:, others].double() - true).norm() / true.norm()
    if name == "int8":
        # A step of the outlier's scale is larger than most of its neighbours, which become zero.
        assert 0.5 < float(error) < 1.5
    else:
        assert float(error) < 0.05


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("flush", [False, True])
def test_what_a_scale_cannot_hold_is_refused(name: str, dtype: torch.dtype, flush: bool) -> None:
    """Wherever it is, and also where the CPU flushes denormals to zero, as the engine has it."""
    codec, top = codec_of(name), TOP[name]
    bad = [float("nan"), float("inf"), float("-inf"), top * 2.0**-26]
    if dtype is not torch.float16:
        bad += [-torch.finfo(dtype).smallest_normal / 4, top * 65504 * 1.01, -torch.finfo(dtype).max]
    # Loading a model on a CPU makes the thread flush: what is to be refused is made before.
    flushed = float(torch.tensor(torch.finfo(torch.float32).smallest_normal) / 4) == 0
    torch.set_flush_denormal(False)
    pages = [torch.zeros(5, 300, dtype=dtype) for _ in range(2 * len(bad))]
    for page, value in zip(pages, bad + bad, strict=True):
        page[4, 299] = value
    for page in pages[: len(bad)]:
        page.copy_(page.flip(0, 1))
    torch.set_flush_denormal(flush)
    try:
        for rows in pages:
            with pytest.raises(ValueError, match=r"not finite or outside\.$"):
                coded_by(codec, rows)
    finally:
        torch.set_flush_denormal(flushed)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_smallest_and_the_largest_blocks(name: str, dtype: torch.dtype) -> None:
    codec, top = codec_of(name), TOP[name]
    most = min(top * 65472, torch.finfo(dtype).max)
    peaks = [0.0, top * 2.0**-24, top * 2.0**-20, top * 2.0**-14, 1.0, most]
    rows = gaussian(len(peaks), (BLOCK,), torch.float32).double()
    rows = (rows / rows.abs().amax(-1, keepdim=True) * torch.tensor(peaks).double()[:, None]).to(dtype)
    for value, peak in enumerate(peaks):
        # Rounding to the dtype must not leave the range.
        index = int(rows[value].abs().argmax())
        exact = torch.tensor(peak, dtype=torch.float64).to(dtype)
        rows[value, index] = exact if exact.double() <= most else torch.nextafter(exact, torch.zeros_like(exact))
    coded = coded_by(codec, rows)
    back = decoded(codec, coded, rows)
    assert bool(back.isfinite().all())
    assert bool((back[0] == 0).all())
    check_error(name, rows, coded, back)
    # Neither one code more than there are on the other side of zero, nor a NaN.
    unused = {"int8": [0x80], "fp8_e4m3": [0x7F, 0xFF]}[name]
    assert not any(bool((coded[:, :BLOCK] == code).any()) for code in unused)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(CODECS),
    dtype=st.sampled_from(FLOATS),
    shape=st.lists(st.integers(1, 20), min_size=0, max_size=3).map(tuple),
    tokens=st.integers(0, 20),
    data=st.data(),
)
def test_any_shape_and_values(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], tokens: int, data: st.DataObject
) -> None:
    codec = codec_of(name)
    rows = gaussian(tokens, shape, dtype, data.draw(st.integers(0, 5)))
    if rows.numel():
        values = st.floats(-60000, 60000, width=32, allow_subnormal=False).filter(lambda x: x == 0 or abs(x) > 1e-3)
        flat = rows.view(-1)
        for value in data.draw(st.lists(values, max_size=20)):
            flat[data.draw(st.integers(0, rows.numel() - 1))] = value
    before = rows.clone()
    try:
        coded = coded_by(codec, rows)
    except ValueError:
        # A lone channel may be as near to zero as that.
        assert float(rows.abs().max()) > 0
        assert int((rows.abs().reshape(tokens, -1).amax(-1) < 448 * 2**-24).sum()) > 0
        return
    assert torch.equal(rows, before)
    back = decoded(codec, coded, rows)
    if codec.lossy:
        check_error(name, rows, coded, back)
    else:
        assert torch.equal(back, rows)
    start, stop = sorted(data.draw(st.tuples(st.integers(0, tokens), st.integers(0, tokens))))
    assert torch.equal(decoded(codec, coded[start:stop], rows), back[start:stop])
    assert torch.equal(coded_by(codec, rows[start:stop]), coded[start:stop])


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("shape", [(129,), (3, 100)])
def test_many_tokens_are_coded_like_one(name: str, shape: tuple[int, ...]) -> None:
    """Also where a call is cut in several runs, the last one shorter."""
    codec, rows = codec_of(name), gaussian(1500, shape, torch.bfloat16)
    coded = coded_by(codec, rows)
    for token in (0, 681, 682, 1023, 1024, 1499):
        assert torch.equal(coded_by(codec, rows[token : token + 1])[0], coded[token])
    one_by_one = torch.cat([decoded(codec, row[None], rows) for row in coded[-20:]])
    assert torch.equal(decoded(codec, coded, rows)[-20:], one_by_one)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("offset", [0, 1, 2])
def test_memory_inside_a_larger_buffer(name: str, offset: int) -> None:
    """At any address, with rows apart, and with heads first as engines hand them out; what lies around stays."""
    codec, rows = codec_of(name), gaussian(2, (10, 65), torch.bfloat16).transpose(0, 1)
    size = codec.token_bytes((2, 65), torch.bfloat16)
    arena = torch.full((12 * (size + 3) + offset,), 200, dtype=torch.uint8)
    out = arena[offset:].view(12, size + 3)[1:11, :size]
    codec.encode(rows, out)
    assert torch.equal(out, coded_by(codec, rows.contiguous()))
    arena_without = arena.clone()
    arena_without[offset:].view(12, size + 3)[1:11, :size] = 200
    assert bool((arena_without == 200).all())
    whole = torch.full((2, 12, 65), 77, dtype=torch.bfloat16)
    codec.decode(out, whole.transpose(0, 1)[1:11])
    assert torch.equal(whole.transpose(0, 1)[1:11], decoded(codec, out, rows))
    assert bool((whole[:, [0, 11]] == 77).all())


@pytest.mark.parametrize("name", LOSSY)
def test_threads_and_inference_mode_do_not_meet(name: str) -> None:
    codec = codec_of(name)
    rows = [gaussian(64, (256,), torch.bfloat16, seed) for seed in range(4)]
    with torch.inference_mode():
        expected = [coded_by(codec, each) for each in rows]
    wrong: list[int] = []

    def work(index: int) -> None:
        with torch.inference_mode(index % 2 == 0):
            coded_by(codec, gaussian(64, (300 + index,), torch.bfloat16))
        for _ in range(50):
            if not torch.equal(coded_by(codec, rows[index]), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_bytes_of_a_token() -> None:
    assert codec_of("none").token_bytes((2, 64), torch.bfloat16) == 256
    for name in LOSSY:
        sizes = [codec_of(name).token_bytes((channels,), torch.bfloat16) for channels in (1, 100, 128, 129, 2560)]
        assert sizes == [1 + 1 + 2, 102, 130, 129 + 1 + 4, 2600]


def test_misuse_is_said_in_one_sentence() -> None:
    with pytest.raises(CacheConfigError, match=r"Unknown codec 'int3'; known are none, int8, fp8_e4m3\.$"):
        codec_of("int3")
    with pytest.raises(CacheConfigError, match=r"codes float32, bfloat16 and float16, not torch.int64\.$"):
        codec_of("int8").token_bytes((4,), torch.int64)
    rows = gaussian(3, (4,), torch.bfloat16)
    for out in (torch.empty(3, 7, dtype=torch.uint8), torch.empty(3, 6), torch.empty(2, 6, dtype=torch.uint8)):
        with pytest.raises(ValueError, match=r"is \(3, 6\) of torch.uint8, not"):
            codec_of("int8").encode(rows, out)
