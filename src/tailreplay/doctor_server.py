"""What a running vLLM server says of itself: whether the connector works in it, and what stands in its way."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.parse
import urllib.request

from tailreplay.doctor import Finding
from tailreplay.errors import TailReplayError

SECONDS = 10
_MOST_BYTES = 64 << 20
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def examine_server(url: str) -> list[Finding]:
    """Ask the server at `url` (its root; an ending of ``/v1`` or ``/metrics`` does not matter).

    Raises
    ------
    TailReplayError
        If there is no vLLM server; one sentence.
    """
    base = _root(url)
    metrics = _get(base, "/metrics")
    if not re.search(r"^(# \w+ )?vllm:", metrics, re.MULTILINE):
        if "tailreplay_cache_pages" in metrics:
            raise TailReplayError(f"{base} is tailreplay's own server of the transformers engine: --url is for vLLM's.")
        raise TailReplayError(f"The server at {base} is not vLLM's: its /metrics has no series of vLLM.")
    return [_version(base), *findings(metrics)]


def findings(metrics: str) -> list[Finding]:
    """Return what vLLM's ``/metrics`` says.

    Parameters
    ----------
    metrics : str
        Prometheus' text format.
    """
    # The series are announced at start and have values only after the first request.
    active = "# TYPE vllm:tailreplay_" in metrics
    labels = _cache_config(metrics)
    return [_connector(metrics, active), *_prefix_caching(labels, active), *_pages(labels, active), *_details(active)]


def _root(url: str) -> str:
    try:
        parts = urllib.parse.urlsplit(url)
        well_formed = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        well_formed = False
    if not well_formed:
        raise TailReplayError(f"--url must look like http://127.0.0.1:8000, got '{url}'.")
    path = re.sub(r"/(v1|metrics)?/*$", "", parts.path)
    return f"{parts.scheme}://{parts.netloc}{path}"


def _get(base: str, path: str) -> str:
    try:
        with urllib.request.urlopen(base + path, timeout=SECONDS) as answer:
            body: bytes = answer.read(_MOST_BYTES)
    except urllib.error.HTTPError as error:
        raise TailReplayError(f"The server at {base} answers {path} with HTTP {error.code}: is it vLLM's?") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = " ".join(str(getattr(error, "reason", error)).split()) or type(error).__name__
        raise TailReplayError(f"No HTTP server answers at {base}: {reason}.") from error
    return body.decode(errors="replace")


def _version(base: str) -> Finding:
    try:
        number = json.loads(_get(base, "/version"))["version"]
    except (TailReplayError, ValueError, KeyError, TypeError):
        return Finding(True, f"vLLM at {base}, of a version that it does not tell.")
    return Finding(True, f"vLLM {number} at {base}.")


def _cache_config(metrics: str) -> dict[str, str]:
    for line in metrics.splitlines():
        if line.startswith("vllm:cache_config_info{"):
            return dict(_LABEL.findall(line))
    return {}


def _total(metrics: str, name: str) -> int:
    series = re.compile(rf"vllm:tailreplay_{name}_total(?:\{{.*\}})? (\S+)(?: \d+)?")
    found = (series.fullmatch(line) for line in metrics.splitlines())
    return int(sum(float(match[1]) for match in found if match))


def _connector(metrics: str, active: bool) -> Finding:
    if not active:
        return Finding(
            False,
            "The connector is not active: start with `tailreplay serve --engine vllm`, or with --kv-transfer-config.",
        )
    prompt, hit = _total(metrics, "prompt_tokens"), _total(metrics, "hit_tokens")
    if not prompt:
        return Finding(True, "The connector is active; it has looked nothing up yet.")
    return Finding(
        True, f"The connector is active: {hit:,} of {prompt:,} prompt tokens were reused ({hit / prompt:.0%})."
    )


def _prefix_caching(labels: dict[str, str], active: bool) -> list[Finding]:
    state = labels.get("enable_prefix_caching")
    mode, block = labels.get("mamba_cache_mode", "?"), labels.get("block_size", "?")
    if state == "True" and active:
        return [
            Finding(
                True,
                f"vLLM's own prefix caching is on too (mode '{mode}'): both work together and approximate hits stay out of "
                "it, but it takes memory and adds little; --no-enable-prefix-caching turns it off.",
            )
        ]
    if state == "True":
        return [
            Finding(
                True,
                f"vLLM's own prefix caching is on (mode '{mode}', blocks of {block} tokens): it reuses whole blocks, and "
                "the connector wants it off (--no-enable-prefix-caching).",
            )
        ]
    if state == "False":
        return [Finding(True, f"vLLM's own prefix caching is off{', as the connector wants it' if active else ''}.")]
    return [Finding(True, "This vLLM does not tell whether its own prefix caching is on; it should be off.")]


def _pages(labels: dict[str, str], active: bool) -> list[Finding]:
    if not active or not labels.get("block_size", "").isdigit():
        return []
    return [
        Finding(True, f"vLLM's blocks have {labels['block_size']} tokens; the connector matches by token all the same.")
    ]


def _details(active: bool) -> list[Finding]:
    if not active:
        return []
    return [
        Finding(
            True,
            "Answers tell cached_tokens only if the server was started with --enable-prompt-tokens-details, which cannot "
            "be seen from outside (`tailreplay serve` does it).",
        )
    ]
