"""Which model types are supported, and why others are not."""

from __future__ import annotations

from transformers import PretrainedConfig

from tailreplay.engines.transformers import compat
from tailreplay.engines.transformers.families.gates import DeltaGate, KimiGate, MambaGate
from tailreplay.engines.transformers.families.generic import Family
from tailreplay.engines.transformers.families.granite import GraniteFamily
from tailreplay.engines.transformers.families.lfm2 import Lfm2Family
from tailreplay.errors import UnsupportedModelError

_GATED_DELTA = Family(gated_delta=True, gate=DeltaGate())
_QWEN3_NEXT = Family(gated_delta=True, gate=DeltaGate("in_proj_ba", by_key_head=True))
_OLMO = Family(gated_delta=True, gate=DeltaGate("a_proj"))
_KIMI_DELTA = Family(gate=KimiGate())
_MAMBA = Family(mixers=("mamba", "self_attn"), state_ops=4.0, gate=MambaGate())
_NEMOTRON = Family(mixers=("mixer",), state_ops=4.0, gate=MambaGate())

FAMILIES: dict[str, Family] = {
    "qwen3_5": _GATED_DELTA,
    "qwen3_5_moe": _GATED_DELTA,
    "qwen3_next": _QWEN3_NEXT,
    "olmo_hybrid": _OLMO,
    "kimi_linear": _KIMI_DELTA,
    "granitemoehybrid": GraniteFamily(),
    "bamba": _MAMBA,
    "nemotron_h": _NEMOTRON,
    "lfm2": Lfm2Family(),
}

_WRONG_CONTINUATION = (
    "its layers ignore the cached state when they continue it with more than one token, so every answer after a hit "
    "would be silently wrong"
)
_HYBRID_LAYER = (
    "each of its layers holds attention and recurrence together, so the input of every layer would have to be stored "
    "and nothing would be skipped"
)
REFUSED = {
    "jamba": _WRONG_CONTINUATION,
    "zamba": _WRONG_CONTINUATION,
    "recurrent_gemma": "it keeps its recurrent state on the modules and not in the cache, where it could be given to it",
    "falcon_h1": _HYBRID_LAYER,
    "zamba2": _HYBRID_LAYER,
}


def model_type(config: PretrainedConfig) -> str:
    """Return the family name of a text config: ``qwen3_5_text`` and ``qwen3_5`` are one family."""
    name: str = config.model_type
    return name.removesuffix("_text")


def family_of(config: PretrainedConfig) -> Family:
    """Return the family of a text config.

    A model of any type whose layers are all full attention gets the generic family: its cache is a plain prefix cache.

    Raises
    ------
    UnsupportedModelError
        If the model cannot be continued or replayed correctly, or is a hybrid of a type that was never checked.
    """
    name = model_type(config)
    if name in REFUSED:
        raise UnsupportedModelError(f"Model type '{name}' is not supported: {REFUSED[name]}.")
    family = FAMILIES.get(name)
    if family is not None:
        return family
    if set(compat.layer_types(config)) == {"full_attention"}:
        return Family(mixers=("self_attn", "attn", "attention"))
    raise UnsupportedModelError(
        f"Model type '{name}' is not supported: nobody has checked that its layers continue a cached state rightly; "
        f"supported hybrids are {', '.join(sorted(FAMILIES))}, and any model whose layers are all full attention."
    )
