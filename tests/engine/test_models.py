"""Which models are taken, which are refused, and how they are described without weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers as hf
from transformers import AutoModelForCausalLM

from tailreplay import HybridLM, PrefixCache, UnsupportedModelError
from tailreplay.engines.transformers.describe import describe
from tailreplay.engines.transformers.families.registry import FAMILIES, REFUSED, family_of
from tailreplay.modes import parse_reuse
from tests.engine.test_families import hit, prefill
from tests.engine.tiny_models import CONFIGS, random_ids, relative, tiny_model

QWEN_4B = {
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


def test_every_supported_family_is_tested() -> None:
    assert set(CONFIGS) == set(FAMILIES)


@pytest.mark.parametrize("name", REFUSED)
def test_unsuitable_families_are_refused_with_the_reason(name: str) -> None:
    config = hf.AutoConfig.for_model(name)
    with pytest.raises(UnsupportedModelError, match=f"'{name}' is not supported: .+") as error:
        family_of(config)
    assert "\n" not in str(error.value)


def test_an_unknown_hybrid_is_refused(tmp_path: Path) -> None:
    config = CONFIGS["qwen3_5"]()
    config.model_type = "qwen9_text"
    with pytest.raises(UnsupportedModelError, match=r"'qwen9' is not supported.*supported hybrids are bamba"):
        family_of(config)


def test_a_model_without_linear_layers_gets_a_plain_exact_cache(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    config = hf.Qwen3Config(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    lm = HybridLM(AutoModelForCausalLM.from_config(config), cache=PrefixCache("8MiB"))
    assert "no linear layers" in caplog.text
    prompt = random_ids(150)
    _, expected = prefill(lm, [*prompt, 7, 8])
    lm.generate(prompt, max_new_tokens=1)
    answer = lm.generate([*prompt, 5], max_new_tokens=1, replay=0.05, store=False)
    assert answer.reuse.matched == 150
    assert answer.reuse.replayed == 0
    assert answer.reuse.exact
    logits = hit(lm, [*prompt, 7, 8], parse_reuse("replay"), 151).extend([8])
    assert relative(logits, expected) < 1e-4


def test_models_whose_layers_are_elsewhere_are_refused() -> None:
    config = hf.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=97)
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel is not supported"):
        HybridLM(AutoModelForCausalLM.from_config(config), cache=PrefixCache("8MiB"))


def test_a_model_with_sliding_attention_is_refused() -> None:
    config = hf.MistralConfig(sliding_window=64, num_hidden_layers=2)
    with pytest.raises(UnsupportedModelError):
        family_of(config)


def test_a_folder_that_is_not_there_is_refused_in_one_sentence() -> None:
    with pytest.raises(UnsupportedModelError, match="no model folder '/no/such/folder'") as error:
        HybridLM.from_pretrained("/no/such/folder")
    assert "\n" not in str(error.value)


def test_an_unknown_model_type_in_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "frobnicate"}))
    with pytest.raises(UnsupportedModelError, match="frobnicate"):
        HybridLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_alone_describes_the_model(name: str, tmp_path: Path) -> None:
    """Groups, layout and costs of the skeleton equal those of the model with weights."""
    config = CONFIGS[name]()
    config.save_pretrained(tmp_path)
    described = describe(tmp_path, dtype=torch.float32)
    real = HybridLM(tiny_model(name), cache=PrefixCache("8MiB")).backbone
    assert described.topology == real.topology
    assert described.layout == real.layout
    assert described.costs == real.costs
    assert described.costs.state_bytes > 0


@pytest.mark.parametrize(("name", "outer"), [("qwen3_5", hf.Qwen3_5Config), ("qwen3_5_moe", hf.Qwen3_5MoeConfig)])
def test_a_config_with_a_vision_part_gives_its_text_model(name: str, outer: type, tmp_path: Path) -> None:
    """The hub's Qwen3.5 checkpoints carry a vision part; their text model is what is cached."""
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    outer(text_config=CONFIGS[name]().to_dict(), vision_config=vision).save_pretrained(tmp_path)
    described = describe(tmp_path, dtype=torch.float32)
    assert described.topology == HybridLM(tiny_model(name), cache=PrefixCache("8MiB")).backbone.topology


def test_a_model_on_two_devices_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS["qwen3_5"]())
    model.model.layers[3].to("meta")
    with pytest.raises(UnsupportedModelError, match="spread over cpu, meta"):
        HybridLM(model, cache=PrefixCache("8MiB"))


def test_bytes_of_a_real_shape(tmp_path: Path) -> None:
    """Qwen3.5-4B in bfloat16: 32 KiB of keys and values and 35 KiB of hiddens a token, 49.5 MiB of states."""
    hf.Qwen3_5TextConfig(**QWEN_4B, dtype="bfloat16").save_pretrained(tmp_path)
    backbone = describe(tmp_path)
    assert backbone.layout.kv_bytes_per_token == 32 * 1024
    assert sum(backbone.layout.hidden_bytes_per_token) == 35 * 1024
    assert backbone.costs.state_bytes == 49.5 * 2**20


def test_costs_count_what_a_layer_multiplies(tmp_path: Path) -> None:
    """Two operations a weight and token, and the attention's pairs, for a config small enough to count by hand."""
    config = CONFIGS["qwen3_5"]()
    config.save_pretrained(tmp_path)
    costs = describe(tmp_path).costs
    ffn = 3 * 64 * 96 * 2
    projections = (64 * (2 * 32 + 64) + 64 * 64 + 2 * 64 * 4 + 64 * 64) * 2
    conv, recurrence = (2 * 32 + 64) * 4 * 2, 6 * 4 * 16 * 16
    assert costs.layers[0].ffn == ffn
    assert costs.layers[0].mixer == projections + conv + recurrence
    # Query with its gate, keys, values, output; 4 query heads read 16 + 16 numbers of each pair.
    assert costs.layers[3].mixer == (64 * 2 * 64 + 2 * 64 * 32 + 64 * 64) * 2
    assert costs.layers[3].per_pair == 2 * 4 * 32


def test_fingerprints_tell_weights_apart() -> None:
    fingerprints = {HybridLM(tiny_model("qwen3_5", seed), cache=PrefixCache("8MiB")).fingerprint for seed in (0, 1, 0)}
    assert len(fingerprints) == 2


def test_one_changed_row_changes_the_fingerprint() -> None:
    lm = HybridLM(AutoModelForCausalLM.from_config(CONFIGS["qwen3_5"]()), cache=PrefixCache("8MiB"))
    prompt = random_ids(100)
    lm.generate(prompt, max_new_tokens=1)
    before = lm.fingerprint
    with torch.no_grad():
        lm.model.model.embed_tokens.weight[50] *= 1.001
    lm.refresh()
    assert lm.fingerprint != before
    assert lm.generate(prompt, max_new_tokens=1).reuse.miss_reason == "unseen_prefix"
