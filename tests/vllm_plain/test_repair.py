"""Repair in vLLM's server, with an application that only notes what it is asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tailreplay.engines.vllm import calibration, repair
from tailreplay.engines.vllm.middleware import ReuseParams
from tailreplay.engines.vllm.repair import exactly


class App:
    """Answers at once, or when it is let go; says what it was asked, and how that ended."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.names: list[str] = []
        self.ended: list[str] = []
        self.hold: asyncio.Event | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = json.loads((await receive())["body"])
        self.asked.append(body)
        self.names.append(dict(scope["headers"]).get(b"x-request-id", b"").decode())
        assert dict(scope["headers"])[b"content-length"] == str(len(json.dumps(body))).encode()
        if self.hold is not None:
            gone = asyncio.create_task(receive())
            held = asyncio.create_task(self.hold.wait())
            await asyncio.wait({gone, held}, return_when=asyncio.FIRST_COMPLETED)
            self.ended.append("gone" if gone.done() else "done")
            for task in (gone, held):
                task.cancel()
        else:
            self.ended.append("done")
        await send({"type": "http.response.start", "status": 200, "headers": []})


@pytest.fixture(autouse=True)
def nothing_noted(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setattr(repair, "_IDLE_SECONDS", 0.0)
    monkeypatch.setattr(calibration, "TIMES", 0)
    repair.APPROXIMATE.clear()
    yield
    repair.APPROXIMATE.clear()


async def ask(middleware: ReuseParams, **body: Any) -> None:
    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def send(message: Any) -> None:
        pass

    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    headers = [(b"authorization", b"Bearer key")]
    if "request_id" in body:
        headers.append((b"x-request-id", body.pop("request_id").encode()))
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    await middleware(scope, receive, send)


async def settle(middleware: ReuseParams) -> None:
    assert middleware._repairs is not None
    task = middleware._repairs._task
    if task is not None:
        await asyncio.wait_for(task, 60)


def test_what_was_approximate_is_asked_again_exactly_and_only_that() -> None:
    async def main() -> None:
        app = App()
        middleware = ReuseParams(app)
        await ask(middleware, prompt=[1, 2, 3], max_tokens=50, stream=True, stop=["x"], cache_salt="s")
        await ask(middleware, messages=[{"role": "user", "content": "hi"}], tailreplay={"ratio": 0.1})
        await settle(middleware)
        assert len(app.asked) == 2, "nothing was approximate"
        repair.note([f"cmpl-{app.names[0]}-0-abcd", f"chatcmpl-{app.names[1]}-ef01", "cmpl-of-somebody-else"])
        await ask(middleware, prompt=[7])
        await settle(middleware)
        chat, completion = app.asked[3:]
        options = {"tailreplay": {"mode": "exact"}}
        assert completion == {
            "prompt": [1, 2, 3], "cache_salt": "s", "max_tokens": 1, "n": 1, "stream": False, "kv_transfer_params": options,
        }  # fmt: skip
        assert (chat["max_completion_tokens"], chat["kv_transfer_params"]) == (1, options)
        assert app.names[3:] == ["", ""], "it is not asked again once more"
        await ask(middleware, prompt=[8])
        await settle(middleware)
        assert len(app.asked) == 6

    asyncio.run(main())


def test_it_makes_room_at_once_and_goes_on_later() -> None:
    async def main() -> None:
        app = App()
        middleware = ReuseParams(app)
        await ask(middleware, prompt=[1, 2, 3])
        repair.note([f"cmpl-{app.names[0]}-0"])
        app.hold = asyncio.Event()
        first = middleware._repairs._task  # type: ignore[union-attr]
        assert first is not None
        async with asyncio.timeout(60):
            while len(app.asked) < 2:
                await asyncio.sleep(0)
        assert app.ended == ["done"], "the repair is held up"
        app.hold, held = None, app.hold
        await ask(middleware, prompt=[9])
        await settle(middleware)
        # The repair was ended as if its client had gone, and was asked again when nobody waited any more.
        assert app.ended == ["done", "done", "gone", "done"]
        assert [asked["prompt"] for asked in app.asked] == [[1, 2, 3], [1, 2, 3], [9], [1, 2, 3]]
        held.set()

    asyncio.run(main())


def test_a_client_s_own_name_is_no_other_request_s() -> None:
    async def main() -> None:
        app = App()
        middleware = ReuseParams(app)
        await ask(middleware, prompt=[1], request_id="a")
        await ask(middleware, prompt=[2])
        ours, theirs = app.names
        assert ours.endswith("-a")
        repair.note([f"cmpl-{theirs}-0"])
        await ask(middleware, prompt=[3])
        await settle(middleware)
        assert [asked["prompt"] for asked in app.asked[3:]] == [[2]]

    asyncio.run(main())


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILREPLAY_REPAIR", "0")

    async def main() -> None:
        app = App()
        middleware = ReuseParams(app)
        await ask(middleware, prompt=[1])
        assert middleware._repairs is None
        assert app.names == [""]

    asyncio.run(main())


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair, "MOST_BYTES", 400)

    async def main() -> None:
        app = App()
        middleware = ReuseParams(app)
        for first in range(20):
            await ask(middleware, prompt=[first] * 10)
        repair.note(f"cmpl-{name}-0" for name in app.names)
        await ask(middleware, prompt=[99])
        await settle(middleware)
        again = [asked["prompt"][0] for asked in app.asked[21:]]
        assert again[0] == 19
        assert 0 < len(again) < 20
        assert 0 not in again

    asyncio.run(main())


NOT_STORED = b'{"prompt": "x", "kv_transfer_params": {"tailreplay": {"store": false}}}'


@pytest.mark.parametrize("body", [b"no json", b"[1]", NOT_STORED])
def test_what_is_not_stored_is_not_computed_again(body: bytes) -> None:
    assert exactly(body) is None
