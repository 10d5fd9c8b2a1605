"""A server with OpenAI's completions API that only looks like one: a brute-force prefix cache and made-up answers."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tailreplay.bench.ideals import common_prefix

MODEL = "fake"


class FakeServer(ThreadingHTTPServer):
    """Completes prompts in streams.

    Parameters
    ----------
    block : int
        Hits are rounded down to a multiple of this.
    least : int
        Shorter hits are misses.
    reports : str
        How reused tokens are reported: "openai", "llama.cpp" or "" for not at all.
    tells_ids : bool
        Whether answers come with token ids.
    tokenizes : bool
        Whether there is ``/tokenize``.
    metrics : bool
        Whether there are tailreplay's counters.
    fails_after : int or None
        How many completions are answered before ``failure`` happens to all others.
    failure : str
        "refuse", "break", "error" (inside the stream), "empty", "garbage", "malformed" or "hang".
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self,
        block: int = 1,
        least: int = 0,
        reports: str = "openai",
        tells_ids: bool = True,
        tokenizes: bool = False,
        metrics: bool = False,
        fails_after: int | None = None,
        failure: str = "refuse",
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.block, self.least, self.reports, self.tells_ids = block, least, reports, tells_ids
        self.tokenizes, self.metrics = tokenizes, metrics
        self.fails_after, self.failure = fails_after, failure
        self.known: list[list[int]] = []
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.counts: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.released = threading.Event()  # ends what hangs
        self.words: dict[str, int] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def ids(self, prompt: Any) -> list[int]:
        """Token ids of a prompt; a word of a text is a token, after one that begins the text."""
        if not isinstance(prompt, str):
            return list(prompt)
        return [0, *(self.words.setdefault(word, len(self.words) + 1) for word in prompt.split())]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves in the middle is no error here."""


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._json({"data": [{"id": MODEL}]})
        elif self.path == "/metrics" and self.server.metrics:
            lines = [
                f'vllm:tailreplay_{kind}_total{{engine="0",{label}="{value}"}} {float(count)}'
                for name, count in self.server.counts.items()
                for kind, label, value in [name.split(":")]
            ]
            lines += [
                'vllm:tailreplay_cache_bytes{engine="0",tier="host"} 4096.0',
                'vllm:tailreplay_cache_anchors{engine="0",tier="host"} 3.0',
                'vllm:tailreplay_anchor_hits_total{engine="0"} 2.0',
                'vllm:tailreplay_hit_starts_total{engine="0",start="complete"} 5.0',
                'vllm:tailreplay_hit_starts_total{engine="0",start="carried"} 7.0',
                'vllm:tailreplay_anchor_hits_created{engine="0"} 1.7e9',
            ]
            self._send(200, "\n".join(["# TYPE vllm:tailreplay_hits counter", *lines]).encode())
        else:
            self._json({"error": {"message": "no such page"}}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        if self.path == "/tokenize" and server.tokenizes:
            with server.lock:
                self._json({"tokens": server.ids(body["prompt"])})
        elif self.path == "/v1/completions":
            with server.lock:
                server.bodies.append(body)
                server.keys.append(self.headers["Authorization"])
                fails = server.fails_after is not None and len(server.bodies) > server.fails_after
            if fails:
                self._fail()
            else:
                self._complete(body)
        else:
            self._json({"error": "no such page"}, 404)

    def _complete(self, body: dict[str, Any]) -> None:
        server = self.server
        with server.lock:
            prompt = server.ids(body["prompt"])
            cached = min(max((common_prefix(known, prompt) for known in server.known), default=0), len(prompt) - 1)
            cached = 0 if cached < server.least else cached - cached % server.block
            answer = [(sum(prompt) + 7 * place) % 1900 + 20 for place in range(body["max_tokens"])]
            said = (
                server.ids(" ".join(f"w{token}" for token in answer))[1:] if isinstance(body["prompt"], str) else answer
            )
            server.known.append([*prompt, *said[:-1]])
            server.counts["hits:provenance:approximate" if cached else "misses:reason:unseen_prefix"] += 1
        self._begin_stream()
        for token in answer:
            choice: dict[str, Any] = {"text": f" w{token}", "finish_reason": None}
            self._chunk({"choices": [{**choice, "token_ids": [token]} if server.tells_ids else choice]})
        usage: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": len(answer)}
        last: dict[str, Any] = {"choices": [], "usage": usage}
        if server.reports == "openai":
            usage["prompt_tokens_details"] = {"cached_tokens": cached} if cached else None
        elif server.reports == "llama.cpp":
            last["timings"] = {"cache_n": cached}
        self._chunk({"choices": [{"text": "", "finish_reason": "length"}]})
        self._chunk(last)
        self.wfile.write(b"data: [DONE]\n\n")

    def _fail(self) -> None:
        failure = self.server.failure
        if failure == "refuse":
            self._json({"error": {"message": "prompt is too\nlong."}}, 400)
            return
        if failure == "hang":
            self.server.released.wait(60)
        self._begin_stream(length=10**6 if failure == "break" else None)
        if failure == "error":
            self._chunk({"error": {"message": "engine died"}})
        elif failure == "garbage":
            self.wfile.write(b"data: <html>\n\n")
        elif failure == "malformed":
            self._chunk({"choices": [None]})
        elif failure == "break":
            # A body that is shorter than its header says.
            self._chunk({"choices": [{"text": "a"}]})

    def _begin_stream(self, length: int | None = None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def _chunk(self, chunk: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        return


@contextmanager
def serving(**options: Any) -> Iterator[FakeServer]:
    """Run a `FakeServer` in a thread."""
    with FakeServer(**options) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.released.set()
        server.shutdown()
