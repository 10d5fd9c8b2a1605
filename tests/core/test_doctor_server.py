"""What the doctor says of a running server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tailreplay.cli import main
from tailreplay.doctor_server import findings

CONFIG = (
    'vllm:cache_config_info{{_block_size_resolved="True",block_size="384",cache_dtype="auto",'
    'enable_prefix_caching="{prefix}",engine="0",mamba_cache_mode="{mode}",num_gpu_blocks="10922"}} 1.0\n'
)
OURS = """\
# HELP vllm:tailreplay_prompt_tokens_total Prompt tokens of requests that were looked up.
# TYPE vllm:tailreplay_prompt_tokens_total counter
vllm:tailreplay_prompt_tokens_total{engine="0",model_name="a b"} 16384.0
vllm:tailreplay_prompt_tokens_total{engine="1",model_name="a b"} 16.0
# TYPE vllm:tailreplay_prompt_tokens_created gauge
vllm:tailreplay_prompt_tokens_created{engine="0",model_name="a b"} 1.7960244831393778e+09
# TYPE vllm:tailreplay_hit_tokens_total counter
vllm:tailreplay_hit_tokens_total{engine="0",model_name="a b"} 8200.0
"""
UNUSED = "# TYPE vllm:tailreplay_prompt_tokens_total counter\n"


def metrics(ours: str = OURS, prefix: str = "False", mode: str = "none") -> str:
    return "# TYPE vllm:cache_config_info gauge\n" + CONFIG.format(prefix=prefix, mode=mode) + ours


def lines(text: str, good: bool) -> str:
    return "\n".join(finding.text for finding in findings(text) if finding.good is good)


def test_a_server_as_it_should_be_has_nothing_bad() -> None:
    assert lines(metrics(), good=False) == ""
    shown = lines(metrics(), good=True)
    assert "active: 8,200 of 16,400 prompt tokens were reused (50%)" in shown
    assert "prefix caching is off, as the connector wants it" in shown
    assert "blocks have 384 tokens" in shown
    assert "--enable-prompt-tokens-details" in shown


def test_a_server_before_its_first_request() -> None:
    assert "has looked nothing up yet" in lines(metrics(UNUSED), good=True)


def test_prefix_caching_beside_the_connector_is_named() -> None:
    assert lines(metrics(prefix="True", mode="align"), good=False) == ""
    shown = lines(metrics(prefix="True", mode="align"), good=True)
    assert "(mode 'align')" in shown
    assert "--no-enable-prefix-caching turns it off" in shown


def test_a_server_without_the_connector() -> None:
    assert "The connector is not active: start with `tailreplay serve" in lines(metrics(""), good=False)
    assert "blocks of 384 tokens" in lines(metrics("", prefix="True", mode="align"), good=True)
    assert lines(metrics(""), good=True) == "vLLM's own prefix caching is off."


def test_a_server_that_does_not_tell_its_settings() -> None:
    assert "does not tell whether its own prefix caching is on" in lines(OURS, good=True)


def test_every_finding_is_one_sentence() -> None:
    texts = (metrics(), metrics(""), metrics(prefix="True"), metrics("", prefix="True"), OURS, UNUSED)
    for found in (finding for text in texts for finding in findings(text)):
        assert "\n" not in found.text
        assert found.text.endswith((".", ")."))


# ---- over HTTP


@contextmanager
def serving(pages: dict[str, str]) -> Iterator[str]:
    """A server of these pages and no others; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path not in pages:
                self.send_error(404)
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(pages[self.path].encode())

        def log_message(self, format: str, *args: Any) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/", "/metrics"])
def test_the_command_asks_the_server(ending: str, capsys: pytest.CaptureFixture[str]) -> None:
    with serving({"/metrics": metrics(), "/version": '{"version": "0.32.0"}'}) as url:
        assert main(["doctor", "--url", url + ending]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"ok  vLLM 0.32.0 at {url}."
    assert all(line.startswith("ok  ") for line in shown)


def test_the_command_fails_when_something_is_bad(capsys: pytest.CaptureFixture[str]) -> None:
    with serving({"/metrics": metrics("")}) as url:
        assert main(["doctor", "--url", url]) == 1
    shown = capsys.readouterr().out
    assert "of a version that it does not tell" in shown
    assert "BAD The connector is not active" in shown


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ({}, "answers /metrics with HTTP 404: is it vLLM's?"),
        ({"/metrics": "python_info 1.0\n"}, "is not vLLM's: its /metrics has no series of vLLM"),
        ({"/metrics": "# TYPE tailreplay_cache_pages gauge\n"}, "tailreplay's own server of the transformers engine"),
    ],
)
def test_other_servers_are_told_apart(pages: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(pages) as url:
        assert main(["doctor", "--url", url]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    "url", ["", "localhost", "127.0.0.1:8000", "ftp://host", "http://", "http://a:b", "file:///etc"]
)
def test_what_is_no_address_is_one_sentence(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--url", url]) == 2
    assert capsys.readouterr().err == f"tailreplay: --url must look like http://127.0.0.1:8000, got '{url}'.\n"


def test_no_server_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # bound, but nobody listens
        assert main(["doctor", "--url", f"http://127.0.0.1:{probe.getsockname()[1]}"]) == 2
    shown = capsys.readouterr().err
    assert "No HTTP server answers at" in shown
    assert shown.count("\n") == 1


def test_something_that_speaks_no_http_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        assert main(["doctor", "--url", f"http://127.0.0.1:{listener.getsockname()[1]}"]) == 2
        thread.join(10)
    shown = capsys.readouterr().err
    assert "No HTTP server answers at" in shown
    assert shown.count("\n") == 1
