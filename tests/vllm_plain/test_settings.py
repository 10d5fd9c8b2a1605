"""Settings of the connector and of requests, without vLLM."""

from __future__ import annotations

import json

import pytest

from tailreplay.engines.vllm import launch, plugin
from tailreplay.engines.vllm.launch import environment, server_command, transfer_config
from tailreplay.engines.vllm.middleware import rewrite
from tailreplay.engines.vllm.settings import Settings, parse_options, parse_settings
from tailreplay.errors import CacheConfigError, InvalidRequestError, UnsupportedModelError


def test_settings_have_defaults_and_take_sizes_as_people_write_them() -> None:
    assert parse_settings({}) == Settings()
    settings = parse_settings({"host_bytes": "1GiB", "replay": "exact", "prefix_wait": 0})
    assert settings.host_bytes == 1 << 30
    assert settings.reuse.mode == "exact"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hostbytes": "1GiB"}, "Unknown connector setting 'hostbytes'"),
        ({"host_bytes": "lots"}, "not a size"),
        ({"replay": 1.5}, "'replay' is wrong"),
        ({"replay": "sometimes"}, "'replay' is wrong"),
        ({"min_match": 0}, "'min_match' must be a positive integer"),
        ({"max_replay_tokens_per_step": "2k"}, "positive integer"),
        ({"prefix_wait": -1}, "at least 0"),
        ({"start": "cold"}, "'start' is wrong: The start must be one of zero, anchor, carried"),
        ({"replay": "exact", "start": "cold"}, "'start' is wrong"),
        ({"reuse_approximate": "sometimes"}, "'reuse_approximate' is wrong"),
        ({"anchor_interval": 100}, "multiple of 16"),
        ({"anchor_codec": "int4"}, "'anchor_codec' must be one of"),
        ({"anchor_bytes": "some"}, "not a size"),
    ],
)
def test_wrong_settings_are_refused_in_one_sentence(given: dict[str, object], message: str) -> None:
    with pytest.raises(CacheConfigError, match=message) as error:
        parse_settings(given)
    assert "\n" not in str(error.value)


def test_a_request_overrides_what_it_names() -> None:
    settings = parse_settings({"replay": 0.1})
    assert parse_options(None, settings).reuse.ratio == 0.1
    assert parse_options({}, settings).reuse.ratio == 0.1
    assert parse_options({"ratio": 0.5}, settings).reuse.ratio == 0.5
    assert parse_options({"mode": "exact"}, settings).reuse.mode == "exact"
    assert parse_options({"store": False}, settings).store is False
    # A baseline's pages are never stored.
    assert parse_options({"mode": "zero"}, settings).store is False


def test_starts_and_approximate_pages_have_defaults_that_requests_override() -> None:
    settings = parse_settings({"replay": 0.1, "start": "anchor", "reuse_approximate": 1, "anchor_bytes": "1MiB"})
    assert settings.storage.anchor_bytes == "1MiB"
    assert (settings.reuse.start, settings.reuse.terms.depth) == ("anchor", 1)
    asked = parse_options({"start": "zero"}, settings).reuse
    assert (asked.start, asked.ratio, asked.depth) == ("zero", 0.1, 1)
    assert parse_options({"mode": "replay"}, settings).reuse.start == "anchor"
    assert parse_options({"reuse_approximate": "never"}, settings).reuse.terms.depth == 0
    exact = parse_options({"mode": "exact"}, settings).reuse
    assert exact.terms.depth == 0
    assert exact.anchors
    # Who names a start wants a replay.
    of_exact = parse_settings({"replay": "exact", "start": "zero"})
    assert of_exact.reuse.mode == "exact"
    assert parse_options({"start": "anchor"}, of_exact).reuse.mode == "replay"
    assert parse_options({"reuse_approximate": "never"}, of_exact).reuse.mode == "exact"


WRONG = [
    5,
    [],
    {"mode": "x"},
    {"mode": None},
    {"ratio": 0},
    {"ratio": "abc"},
    {"ratio": 1.5},
    {"store": 1},
    {"extra": 1},
    {"start": "cold"},
    {"mode": "exact", "start": "zero"},
    {"reuse_approximate": -1},
]


@pytest.mark.parametrize("given", WRONG)
def test_nonsense_of_a_request_is_refused(given: object) -> None:
    with pytest.raises(InvalidRequestError):
        parse_options(given, Settings())
    for body in ({"tailreplay": given}, {"kv_transfer_params": {"tailreplay": given}}):
        with pytest.raises(InvalidRequestError):
            rewrite(json.dumps(body).encode())


def test_the_middleware_puts_options_where_the_connector_finds_them() -> None:
    body = {"prompt": "x", "tailreplay": {"mode": "exact"}, "kv_transfer_params": {"other": 1}}
    assert json.loads(rewrite(json.dumps(body).encode())) == {
        "prompt": "x",
        "kv_transfer_params": {"other": 1, "tailreplay": {"mode": "exact"}},
    }
    for untouched in (b"no json", b"[1]", b'{"prompt": "x"}'):
        assert rewrite(untouched) == untouched
    with pytest.raises(InvalidRequestError, match="once"):
        rewrite(b'{"tailreplay": {}, "kv_transfer_params": {"tailreplay": {}}}')


def test_the_servers_command_sets_what_reuse_needs() -> None:
    command = server_command(
        "m", "name", "127.0.0.1", 8000, {"host_bytes": "1GiB"}, ["--max-model-len", "100"], cpu=True
    )
    assert "--no-enable-prefix-caching" in command
    assert "--enable-prompt-tokens-details" in command
    assert json.loads(command[command.index("--kv-transfer-config") + 1]) == transfer_config({"host_bytes": "1GiB"})
    assert command[-2:] == ["--max-model-len", "100"]
    assert command[command.index("--dtype") + 1] == "bfloat16"
    given = server_command("m", "name", "127.0.0.1", 8000, {}, ["--dtype", "float16"], cpu=True)
    assert given.count("--dtype") == 1


def test_a_model_without_taps_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_models", [])
    with pytest.raises(UnsupportedModelError, match=r"architectures that it knows are .*Qwen3NextForCausalLM"):
        plugin.tapped_model()


def test_the_servers_processes_find_the_shim() -> None:
    assert environment({"PYTHONPATH": "/elsewhere"})["PYTHONPATH"].endswith(":/elsewhere")
    assert environment({"VLLM_CPU_KVCACHE_SPACE": "7"})["VLLM_CPU_KVCACHE_SPACE"] == "7"


def test_a_small_machine_gives_the_scheduler_one_core_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_cores", lambda: 2)
    assert environment({})["VLLM_CPU_NUM_OF_RESERVED_CPU"] == "1"
    assert environment({"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"})["VLLM_CPU_NUM_OF_RESERVED_CPU"] == "0"
    monkeypatch.setattr(launch, "_cores", lambda: 64)
    assert "VLLM_CPU_NUM_OF_RESERVED_CPU" not in environment({})
