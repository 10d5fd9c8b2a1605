"""The CPU kernels of the gated delta rule against the float64 recurrence, and how they get into a model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5 as library

from tailreplay import naive
from tailreplay.engines.transformers import compat
from tailreplay.engines.transformers.backbone import Backbone
from tailreplay.engines.transformers.kernels import install as kernels
from tailreplay.engines.transformers.kernels.library import chunk_rule, convolution, step_rule
from tailreplay.engines.transformers.kernels.triangular import unit_lower_inverse
from tests.engine.tiny_models import CONFIGS, random_ids, relative, tiny_model

LENGTHS = (1, 2, 3, 63, 64, 65, 130, 300)
FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid")
HEADS, KEY_DIM, VALUE_DIM = 3, 16, 24
LIBRARY_CHUNKS = library.torch_chunk_gated_delta_rule
LIBRARY_STEP = library.torch_recurrent_gated_delta_rule
LIBRARY_CONV = library.causal_conv1d_fn


def refused(*_: Any, **__: Any) -> None:
    """Stands for the library's function where it must not be called."""
    raise AssertionError("the library's function was called")


def inputs(
    tokens: int,
    batch: int = 1,
    decay: float = 0.02,
    strength: float = 1.0,
    initial: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of the rule; `decay` is the mean of -log(alpha), `strength` the largest beta."""
    torch.manual_seed(seed)
    lead = (batch, tokens, HEADS)
    return {
        "query": torch.randn(*lead, KEY_DIM).to(dtype),
        "key": torch.randn(*lead, KEY_DIM).to(dtype),
        "value": torch.randn(*lead, VALUE_DIM).to(dtype),
        "g": -2 * decay * torch.rand(lead),
        "beta": (strength * torch.rand(lead)).to(dtype),
        "initial_state": torch.randn(batch, HEADS, KEY_DIM, VALUE_DIM) if initial else None,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }


def oracle(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and states in float64, row by row."""
    rows = []
    arrays = {name: value.double().numpy() for name, value in given.items() if isinstance(value, torch.Tensor)}
    for row in range(len(arrays["key"])):
        query, key = (arrays[name][row] for name in ("query", "key"))
        query, key = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (query, key))
        initial = arrays["initial_state"][row] if "initial_state" in arrays else None
        rest = (arrays[name][row] for name in ("value", "g", "beta"))
        rows.append(naive.gated_delta_outputs(query / np.sqrt(KEY_DIM), key, *rest, initial))
    return tuple(torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))


def errors(function: Callable[..., Any], given: dict[str, Any]) -> tuple[float, float]:
    """Relative errors of outputs and state."""
    arguments = dict(given)
    leading = [arguments.pop(name) for name in ("query", "key", "value")]
    output, state = function(*leading, **arguments)
    expected, final = oracle(given)
    assert output.dtype == given["query"].dtype
    assert state.dtype == torch.float32
    return relative(output, expected), relative(state, final)


def assert_as_good_as_the_library(given: dict[str, Any], floor: float = 5e-7) -> None:
    ours, theirs = errors(chunk_rule(refused), given), errors(LIBRARY_CHUNKS, given)
    for mine, its in zip(ours, theirs, strict=True):
        assert mine <= max(1.5 * its, floor)


@pytest.mark.parametrize("decay", [0.0005, 0.02, 3.0])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_lengths_and_decays(tokens: int, decay: float) -> None:
    assert_as_good_as_the_library(inputs(tokens, decay=decay))


@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types_batches_and_states(dtype: torch.dtype, initial: bool) -> None:
    assert_as_good_as_the_library(inputs(130, batch=2, initial=initial, dtype=dtype))


@pytest.mark.parametrize("alpha", ["slow", "one", "gone", "now and then"])
@pytest.mark.parametrize("keys", ["random", "identical"])
def test_hard_cases(alpha: str, keys: str) -> None:
    """Eigenvalues down to -1 (beta up to 2), keys that all write to one place, gates at both ends."""
    given = inputs(257, strength=2.0)
    if keys == "identical":
        given["key"] = given["key"][:, :1].expand_as(given["key"])
        given["beta"] = given["beta"].fill_(2.0 if alpha == "one" else 1.9)
    if alpha == "one":
        given["g"].zero_()
    elif alpha == "gone":
        given["g"].fill_(-60.0)
    elif alpha == "now and then":
        given["g"][:, ::7] = -40.0
    assert_as_good_as_the_library(given, floor=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("decay", [0.0005, 3.0])
def test_one_token(decay: float, batch: int, dtype: torch.dtype) -> None:
    given = inputs(1, batch, decay, strength=2.0, dtype=dtype)
    ours, theirs = errors(step_rule(refused, least=0), given), errors(LIBRARY_STEP, given)
    for mine, its in zip(ours, theirs, strict=True):
        assert mine <= max(1.5 * its, 5e-7)


def test_continuation_equals_one_run() -> None:
    given = inputs(200)
    rule, parts = chunk_rule(refused), []
    whole, final = rule(**given)
    state = given["initial_state"]
    for start, stop in ((0, 37), (37, 38), (38, 200)):
        part = {
            name: value[:, start:stop]
            if isinstance(value, torch.Tensor) and value.dim() > 2 and name != "initial_state"
            else value
            for name, value in given.items()
        }
        output, state = rule(**{**part, "initial_state": state})
        parts.append(output)
    assert relative(torch.cat(parts, dim=1), whole) < 1e-6
    assert relative(state, final) < 1e-6


def test_inputs_are_left_alone() -> None:
    for rule, tokens in ((chunk_rule(refused), 70), (step_rule(refused, least=0), 1)):
        given = inputs(tokens)
        before = {name: value.clone() for name, value in given.items() if isinstance(value, torch.Tensor)}
        rule(**given)
        assert all(torch.equal(given[name], value) for name, value in before.items())


def test_queries_of_several_value_heads() -> None:
    """Newer library versions hand over fewer query and key heads than value heads."""
    given = inputs(40, initial=False)
    few = {**given, "query": given["query"][:, :, :1], "key": given["key"][:, :, :1]}
    many = {name: few[name].expand_as(given[name]) for name in ("query", "key")}
    output, state = chunk_rule(refused)(**few)
    expected, final = chunk_rule(refused)(**{**given, **many})
    assert torch.equal(output, expected)
    assert torch.equal(state, final)


@pytest.mark.parametrize("size", [1, 8, 16, 24, 32, 64])
def test_triangular_inverse(size: int) -> None:
    torch.manual_seed(0)
    strict = 2 * torch.rand(5, size, size).tril(-1) + torch.full((size, size), torch.nan).triu(1).nan_to_num(0)
    inverse = unit_lower_inverse(strict).double()
    product = inverse @ (strict.double() + torch.eye(size).double())
    assert relative(product, torch.eye(size).expand(5, size, size)) < 1e-6 * float(inverse.norm())


@pytest.mark.parametrize(
    "change",
    [
        {"use_qk_l2norm_in_kernel": False},
        {"chunk_size": 32},
        {"cu_seqlens": torch.tensor([0, 3, 7])},
        {"g": torch.zeros(1, 7, 1)},
        {"query": torch.zeros(1, 7, HEADS, KEY_DIM, dtype=torch.float64)},
        {"initial_state": torch.zeros(1, HEADS, VALUE_DIM, KEY_DIM)},
        {"value": torch.zeros(1, 7, HEADS, VALUE_DIM, device="meta")},
        {"key": torch.zeros(1, 7, HEADS, KEY_DIM, requires_grad=True)},
    ],
)
def test_what_is_not_known_goes_to_the_library(change: dict[str, Any]) -> None:
    for make in (chunk_rule, step_rule):
        seen = {}

        def remember(*args: Any, seen: dict[str, Any] = seen, **kwargs: Any) -> str:
            seen.update(kwargs, query=args[0], key=args[1], value=args[2])
            return "the library's"

        given = {**inputs(7), **change}
        assert make(remember)(**given) == "the library's"
        assert all(seen[name] is value for name, value in given.items())


def test_several_tokens_are_no_step() -> None:
    step = step_rule(lambda *_, **__: "the library's", least=0)
    assert step(**inputs(2)) == "the library's"
    assert step(**inputs(1, initial=False)) == "the library's"


def test_a_small_states_step_is_left_to_the_library() -> None:
    given = inputs(1)
    step = step_rule(lambda *_, **__: "the library's", least=given["initial_state"].numel() + 1)
    assert step(**given) == "the library's"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3, 4, 65])
@pytest.mark.parametrize("token_major", [True, False])
def test_convolution(tokens: int, token_major: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    channels, batch = 48, 2
    hidden = torch.randn(batch, tokens, channels).to(dtype).transpose(1, 2)
    hidden = hidden if token_major else hidden.contiguous()
    weight, bias = torch.randn(channels, 4).to(dtype), torch.randn(channels).to(dtype)
    before = hidden.clone()
    plain = convolution(refused)(hidden, weight)
    for row in range(batch):
        expected = naive.causal_conv1d(hidden[row].T.double().numpy(), weight.double().numpy())
        assert relative(plain[row].T, torch.from_numpy(expected)) < (1e-6 if dtype is torch.float32 else 4e-3)
    active = convolution(refused)(hidden, weight, bias, activation="silu")
    assert (
        relative(active, LIBRARY_CONV(hidden, weight, bias, activation="silu")) < 1e-2 * (dtype != torch.float32) + 1e-6
    )
    assert torch.equal(hidden, before)
    assert plain.stride(1) == 1


@pytest.mark.parametrize("change", [{"activation": "gelu"}, {"weight": torch.zeros(8, 4, dtype=torch.float64)}])
def test_other_convolutions_go_to_the_library(change: dict[str, Any]) -> None:
    given = {"hidden_states": torch.zeros(1, 8, 5), "weight": torch.zeros(8, 4), **change}
    assert convolution(lambda *_, **__: "the library's")(**given) == "the library's"


# ---- in a model


def fresh(name: str) -> torch.nn.Module:
    """An own copy of a tiny model, without kernels."""
    model = AutoModelForCausalLM.from_config(CONFIGS[name]())
    model.load_state_dict(tiny_model(name).state_dict())
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.eval()


def mixers(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn")]


@torch.inference_mode()
def answers(model: torch.nn.Module, backbone: Backbone) -> list[torch.Tensor]:
    """Logits of a prefill, of its continuation by several tokens, and of one token; then the states."""
    ids, cache = torch.tensor([random_ids(80)]), backbone.new_cache(80)
    positions = torch.arange(80)[None]
    found = [
        compat.call_model(model, ids[:, start:stop], positions[:, start:stop], cache, stop - start)
        for start, stop in ((0, 50), (50, 79), (79, 80))
    ]
    layers = [layer for group in backbone.topology.groups for layer in group.stateful]
    return [*found, *(state for layer in layers for state in compat.states(cache, layer) if state is not None)]


@pytest.mark.parametrize("name", FAMILIES)
def test_models_answer_as_with_the_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh(name)
    monkeypatch.setenv(kernels.VARIABLE, "0")
    plain = Backbone(model)
    assert not plain.kernels
    expected = answers(model, plain)
    monkeypatch.delenv(kernels.VARIABLE)
    backbone = Backbone(model)
    assert backbone.kernels
    got = answers(model, backbone)
    assert all(relative(mine, its) < 1e-5 for mine, its in zip(got, expected, strict=True))
    # Rounding differs, so kernels that were never called would show.
    assert not all(torch.equal(mine, its) for mine, its in zip(got, expected, strict=True))


def test_kernels_are_the_models_own() -> None:
    model, other = fresh("qwen3_5"), fresh("qwen3_5")
    before = type(mixers(model)[0]).forward, library.torch_chunk_gated_delta_rule
    assert kernels.install(mixers(model))
    forwards = [mixer.forward for mixer in mixers(model)]
    assert kernels.install(mixers(model))
    assert [mixer.forward for mixer in mixers(model)] == forwards
    assert not any(kernels.installed(mixer) for mixer in mixers(other))
    assert (type(mixers(model)[0]).forward, library.torch_chunk_gated_delta_rule) == before
    twin = copy.deepcopy(model)
    assert mixers(twin)[0].forward.__self__ is mixers(twin)[0]
    kernels.uninstall(mixers(model))
    assert not any("forward" in vars(mixer) for mixer in mixers(model))


def test_decorators_of_a_forward_are_kept() -> None:
    """The library's decorators rename arguments and run hooks: they must go on doing so."""
    forward = type(mixers(tiny_model("qwen3_5"))[0]).forward
    depth, copied = 0, kernels._with_kernels(forward)
    while hasattr(forward, "__wrapped__"):
        assert copied.__code__ is forward.__code__
        forward, copied, depth = forward.__wrapped__, copied.__wrapped__, depth + 1
    assert depth
    assert copied.__globals__["torch_chunk_gated_delta_rule"] is not library.torch_chunk_gated_delta_rule


def test_somebody_elses_forward_is_left() -> None:
    model = fresh("qwen3_5")
    own = mixers(model)[0].forward
    mixers(model)[0].forward = own
    assert not kernels.install(mixers(model))
    assert mixers(model)[0].forward is own
    kernels.uninstall(mixers(model))
    assert mixers(model)[0].forward is own


def test_other_families_are_left() -> None:
    assert not Backbone(tiny_model("granitemoehybrid")).kernels
    assert not kernels.install([torch.nn.Linear(2, 2)])
