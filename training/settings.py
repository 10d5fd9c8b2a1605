"""The run's settings, read from a TOML file. Unknown or missing keys are errors."""

from __future__ import annotations

import dataclasses
import hashlib
import tomllib
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT = Path(__file__).with_name("config.toml")


@dataclass(frozen=True)
class ModelSettings:
    """Sizes of the model. `layers` has one letter a layer: L for linear, F for full attention."""

    layers: str
    hidden: int
    feed_forward: int
    vocabulary: int
    query_heads: int
    kv_heads: int
    head_dim: int
    delta_heads: int
    delta_dim: int
    rotary_share: float
    rope_theta: float
    max_positions: int
    horizon_min: float
    horizon_max: float


@dataclass(frozen=True)
class OptimiserSettings:
    """Learning rates and their course. Rates of decay parameters are small, so that horizons stay apart."""

    muon: float
    adam: float
    decay_parameters: float
    momentum: float
    weight_decay: float
    warmup_steps: int
    decay_share: float
    clip: float
    text_weight: float
    answer_weight: float


@dataclass(frozen=True)
class Stage:
    """A part of the curriculum.

    Attributes
    ----------
    name : str
    until : float
        End of the stage: millions of tokens if above 1, else a share of the run's total.
    tokens_per_step : int
        Of both ranks together.
    lengths : dict of int to float
        Sequence lengths (powers of two that divide a rank's tokens) and their shares of the steps.
    tasks : dict of str to float
        Tasks and their shares of the tokens.
    """

    name: str
    until: float
    tokens_per_step: int
    lengths: dict[int, float]
    tasks: dict[str, float]


@dataclass(frozen=True)
class RunSettings:
    """How long, how often."""

    seed: int
    ranks: int
    tokens: int
    minutes: float
    log_every: int
    evaluate_minutes: float
    checkpoint_minutes: float


@dataclass(frozen=True)
class Settings:
    """All of a run's settings."""

    run: RunSettings
    model: ModelSettings
    optimiser: OptimiserSettings
    stages: tuple[Stage, ...]

    @property
    def digest(self) -> str:
        """Identity of what a checkpoint depends on: everything but the clock's settings and the rhythm of reports."""
        told = dataclasses.asdict(self)
        told["run"] = {key: told["run"][key] for key in ("seed", "ranks")}
        return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def load_settings(path: Path = DEFAULT, **overrides: Any) -> Settings:
    """Read settings from a TOML file.

    Parameters
    ----------
    path : Path
    **overrides
        Replace keys of the ``[run]`` table; None leaves the file's value.

    Raises
    ------
    SystemExit
        With one sentence, if a key is missing, unknown or has no sensible value.
    """
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    table["run"].update({key: value for key, value in overrides.items() if value is not None})
    stages = tuple(_fill(Stage, _with_int_lengths(stage), f"{path}: [[stages]]") for stage in table.pop("stages"))
    parts = {
        "run": _fill(RunSettings, table.pop("run"), f"{path}: [run]"),
        "model": _fill(ModelSettings, table.pop("model"), f"{path}: [model]"),
        "optimiser": _fill(OptimiserSettings, table.pop("optimiser"), f"{path}: [optimiser]"),
    }
    if table:
        raise SystemExit(f"{path} has an unknown table [{next(iter(table))}].")
    settings = Settings(**parts, stages=stages)
    _check(settings, path)
    return settings


def _with_int_lengths(stage: dict[str, Any]) -> dict[str, Any]:
    return {**stage, "lengths": {int(length): share for length, share in stage["lengths"].items()}}


def _fill(kind: type[Any], given: dict[str, Any], where: str) -> Any:
    hints = typing.get_type_hints(kind)
    if odd := set(given) ^ set(hints):
        raise SystemExit(f"{where} has a missing or unknown key: {sorted(odd)[0]}.")
    for name, hint in hints.items():
        plain = dict if isinstance(hint, types.GenericAlias) else hint
        if plain is float and isinstance(given[name], int):
            given[name] = float(given[name])
        if not isinstance(given[name], plain):
            raise SystemExit(f"{where}: {name} must be of type {plain.__name__}.")
    return kind(**given)


def _check(settings: Settings, path: Path) -> None:
    for stage in settings.stages:
        share = stage.tokens_per_step // settings.run.ranks
        for length in stage.lengths:
            if share % length:
                raise SystemExit(f"{path}: length {length} does not divide {share}, a rank's tokens in {stage.name}.")
            if length > settings.model.max_positions:
                raise SystemExit(f"{path}: length {length} of {stage.name} is above max_positions.")
    if settings.stages[-1].until != 1:
        raise SystemExit(f"{path}: the last stage must end at 1.0, the end of the run.")
