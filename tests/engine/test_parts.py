"""Small parts of the engine: the key-value buffer, the text stream, the copy stream."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tailreplay import HybridLM
from tailreplay.engines.transformers.compat import DynamicLayer
from tailreplay.engines.transformers.kv_layer import PreallocatedLayer
from tailreplay.engines.transformers.text import TextStream
from tailreplay.pages import PartSpec
from tailreplay.streams import CopyStream
from tailreplay.tiers.host import HostArena


@pytest.mark.parametrize("capacity", [1, 5, 100])
def test_the_buffer_holds_what_the_librarys_layer_holds(capacity: int) -> None:
    torch.manual_seed(0)
    ours, theirs = PreallocatedLayer(capacity), DynamicLayer()
    for count in (3, 1, 1, 7, 20):
        keys, values = torch.randn(1, 2, count, 4), torch.randn(1, 2, count, 6)
        for got, want in zip(ours.update(keys, values), theirs.update(keys, values), strict=True):
            assert torch.equal(got, want)
        assert ours.get_seq_length() == theirs.get_seq_length()
        assert ours.get_mask_sizes(3) == theirs.get_mask_sizes(3)
    assert torch.equal(ours.rows(2, 9)[0], theirs.keys[0, :, 2:9].transpose(0, 1))


def test_a_copied_buffer_has_its_own_future() -> None:
    layer = PreallocatedLayer(4)
    layer.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
    twin = layer.copy(10)
    twin.update(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4))
    assert layer.get_seq_length() == 3
    assert twin.get_seq_length() == 4
    assert torch.equal(twin.rows(0, 3)[0], layer.rows(0, 3)[0])


def test_the_buffer_refuses_a_batch() -> None:
    with pytest.raises(ValueError, match="one sequence"):
        PreallocatedLayer(4).update(torch.ones(2, 2, 3, 4), torch.ones(2, 2, 3, 4))


def test_the_buffer_refuses_what_would_leave_states_behind() -> None:
    layer = PreallocatedLayer(4)
    layer.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
    for act in (
        lambda: layer.crop(-1),
        layer.reset,
        lambda: layer.batch_repeat_interleave(2),
        lambda: layer.batch_select_indices(torch.tensor([0])),
    ):
        with pytest.raises(RuntimeError):
            act()
    assert layer.get_seq_length() == layer.keys.shape[-2] == 3


def test_copies_run_in_line_on_cpu() -> None:
    copies, out = CopyStream(torch.device("cpu")), torch.zeros(3)
    with copies.copying():
        out.copy_(torch.ones(3))
    copies.wait()
    copies.synchronize()
    assert out.tolist() == [1, 1, 1]


class Letters:
    """A tokenizer whose tokens are bytes."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")


@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=3), max_size=3))
def test_streamed_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    stream = TextStream(Letters(), tuple(stops))
    out = []
    for token in text.encode():
        out.append(stream.push(token))
        if stream.stopped:
            break
    out.append(stream.flush())
    # The text is cut when the first character arrives that completes a stop string, before the earliest one by then.
    end = next((i for i in range(len(text) + 1) if any(stop in text[:i] for stop in stops)), None)
    expected = text if end is None else text[: min(text.find(stop) for stop in stops if stop in text[:end])]
    assert "".join(out) == stream.text == expected
    assert stream.stopped == (end is not None)


def test_a_character_of_several_tokens_comes_whole() -> None:
    stream = TextStream(Letters())
    pieces = [stream.push(token) for token in "é€".encode()]
    assert pieces == ["", "é", "", "", "€"]


def test_text_of_the_bundled_tokenizer_survives_streaming(bundled: HybridLM) -> None:
    text = "The café costs 12.5 €\n and  more; ünïcödé too."
    stream = TextStream(bundled.tokenizer)
    out = "".join(stream.push(token) for token in bundled.encode(text)) + stream.flush()
    assert out == bundled.tokenizer.decode(bundled.encode(text), skip_special_tokens=True)


def test_tails_are_read_before_keys_and_values(tiny_without_anchors: HybridLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = tiny_without_anchors
    ids = torch.randint(3, 90, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    first = tiny.generate(ids, max_new_tokens=1)
    reads: list[str] = []
    read = HostArena.read

    def noting(arena: HostArena, part: PartSpec, *args: Any) -> None:
        reads.append(part.name[0])
        read(arena, part, *args)

    monkeypatch.setattr(HostArena, "read", noting)
    tiny.prefill_chunk = 128
    assert tiny.generate([*ids, 5], replay=0.5, max_new_tokens=1, store=False).reuse.replayed == 200
    assert first.reuse.matched == 0
    groups = len(tiny.backbone.topology.stored_groups)
    attention = len(tiny.backbone.topology.attention_layers)
    # The second chunk of the tail comes when the first has been computed.
    assert reads == ["h"] * groups + ["k", "v"] * attention + ["h"] * groups
