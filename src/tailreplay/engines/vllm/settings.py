"""Settings of the connector, from vLLM's ``kv_connector_extra_config``, and what a request may override."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tailreplay.budget import Ratio
from tailreplay.errors import CacheConfigError, InvalidRequestError
from tailreplay.modes import DEFAULT_START, Reuse, check_interval, parse_reuse
from tailreplay.sizes import parse_bytes
from tailreplay.storage import Storage, parse_storage

REQUEST_FIELDS = ("mode", "ratio", "store", "start", "reuse_approximate", "calibrate")
STORAGE_FIELDS = (
    "tiers", "hidden_codec", "kv_codec", "host_codec", "anchor_bytes", "anchor_codec", "hidden_share", "policy",
    "reserved", "limits", "deadline",
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What the operator sets once.

    Attributes
    ----------
    host_bytes : int
        Hard limit of the store of one rank.
    replay : float or str
        Default of requests that name no mode: a ratio, "exact", "zero" or "off".
    start : str
        What the tails of requests begin with that do not say: "zero", "anchor", "carried" or "mixed" (see
        `tailreplay.modes.Reuse`).
    reuse_approximate : int or str
        Behind how many approximate replays pages may lie for them: "always", "never" or a number.
    anchor_interval : int
        How many prompt tokens shall lie between saved states at most, a multiple of 16; 0 for no limit. States are saved
        where vLLM ends a chunk, which nobody can move: longer chunks get a warning at the start.
    min_match : int
        A shorter match is a miss.
    min_tail : int
        Shortest tail.
    max_replay_tokens_per_step : int
        Most tokens replayed between two forwards; a longer tail goes on in the next step.
    decode_slowdown : float
        While other requests decode, how much longer a step may get for a replay, as a share of its time without one: fewer
        tokens are replayed then, as many as measured times allow. 0 for no such limit.
    prefix_wait : float
        Seconds that a request waits at most for another one that is just computing its prefix.
    checksums : bool
        Whether pages are checked against what was stored before they are used.
    storage : Storage
        Tiers below host memory, codecs, eviction and quotas, from the settings of `STORAGE_FIELDS`.
    async_loads : bool
        Whether a hit is restored beside other requests' steps. False restores it before the step that needs it, which
        stalls all of them, and ends the engine if a page cannot be read: for measurements.
    """

    host_bytes: int = 4 << 30
    replay: float | str = 0.05
    start: str = DEFAULT_START
    reuse_approximate: int | str = "always"
    anchor_interval: int = 0
    min_match: int = 32
    min_tail: int = 64
    max_replay_tokens_per_step: int = 2048
    decode_slowdown: float = 0.6
    prefix_wait: float = 30.0
    checksums: bool = True
    async_loads: bool = True
    storage: Storage = field(default_factory=Storage)

    @property
    def host_codec(self) -> str:
        """In which host memory holds hiddens."""
        return self.storage.host_codec

    @property
    def reuse(self) -> Reuse:
        """The default mode."""
        return self.parse({})

    def parse(self, given: Mapping[str, Any]) -> Reuse:
        """Return what `given` asks for; what it does not name is the operator's default.

        Raises
        ------
        InvalidRequestError
            If a value is not usable.
        """
        named = isinstance(self.replay, str)
        mode, ratio = (self.replay, None) if named else ("replay", self.replay)
        if "mode" in given or "ratio" in given:
            mode, ratio = given.get("mode", "replay"), given.get("ratio")
        elif "start" in given and mode != "replay":
            mode, ratio = "replay", None
        start = given.get("start", self.start if mode == "replay" else None)
        depth = given.get("reuse_approximate", self.reuse_approximate)
        return parse_reuse(mode, ratio, self.min_tail, start, depth)


def parse_settings(extra: Mapping[str, Any]) -> Settings:
    """Read the connector's settings.

    Raises
    ------
    CacheConfigError
        If a name is unknown or a value is not usable; one sentence each.
    """
    known = {each.name for each in fields(Settings)} - {"storage"} | set(STORAGE_FIELDS)
    unknown = sorted(set(extra) - known)
    if unknown:
        raise CacheConfigError(f"Unknown connector setting '{unknown[0]}'; known are {', '.join(sorted(known))}.")
    values = dict(extra)
    if "host_bytes" in values:
        values["host_bytes"] = parse_bytes(values["host_bytes"])
    for name in ("min_match", "min_tail", "max_replay_tokens_per_step"):
        value = values.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CacheConfigError(f"The connector setting '{name}' must be a positive integer, got {value!r}.")
    for name in ("prefix_wait", "decode_slowdown"):
        value = values.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise CacheConfigError(f"The connector setting '{name}' must be a number, at least 0, got {value!r}.")
    for name in ("checksums", "async_loads"):
        if not isinstance(values.get(name, True), bool):
            raise CacheConfigError(f"The connector setting '{name}' must be true or false, got {values[name]!r}.")
    stored = {name: values.pop(name) for name in STORAGE_FIELDS if name in values}
    settings = Settings(**values, storage=parse_storage(stored))
    for name, asked in (
        ("start", {"mode": "replay", "reuse_approximate": "always"}),
        ("reuse_approximate", {"mode": "replay"}),
        ("replay", {}),
    ):
        try:
            settings.parse(asked)
        except InvalidRequestError as error:
            raise CacheConfigError(f"The connector setting '{name}' is wrong: {error}") from error
    try:
        check_interval(settings.anchor_interval)
    except InvalidRequestError as error:
        raise CacheConfigError(str(error)) from error
    return settings


@dataclass(frozen=True)
class RequestOptions:
    """What one request asks for.

    Attributes
    ----------
    calibrates : bool
        Whether the model's mean state is to be made of it: it takes exact pages only, and no saved states, and replays all.
    """

    reuse: Reuse
    store: bool = True
    calibrates: bool = False


def parse_options(given: Any, settings: Settings) -> RequestOptions:
    """Read ``kv_transfer_params["tailreplay"]`` of a request; None is the operator's default.

    Raises
    ------
    InvalidRequestError
        If it is not an object of `REQUEST_FIELDS` with usable values.
    """
    if given is None:
        return RequestOptions(settings.reuse, settings.reuse.mode != "zero")
    if not isinstance(given, Mapping):
        raise InvalidRequestError(f"'tailreplay' must be an object, got {given!r}.", "tailreplay")
    unknown = sorted(set(map(str, given)) - set(REQUEST_FIELDS))
    if unknown:
        raise InvalidRequestError(
            f"'tailreplay' has no field '{unknown[0]}'; known are {', '.join(REQUEST_FIELDS)}.", "tailreplay"
        )
    if given.get("calibrate") is True and len(given) == 1:
        return RequestOptions(Reuse("replay", Ratio(1.0), start="zero", depth=0), calibrates=True)
    if "calibrate" in given:
        raise InvalidRequestError("'calibrate' can only be true, and goes alone.", "tailreplay.calibrate")
    store = given.get("store", True)
    if not isinstance(store, bool):
        raise InvalidRequestError(f"'store' must be true or false, got {store!r}.", "tailreplay.store")
    reuse = settings.parse(given)
    return RequestOptions(reuse, store and reuse.mode != "zero")
