"""Who asks for the mean state: vLLM's server, with an application that only notes what it is asked, and an `LLM`'s user."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from tailreplay.engines.vllm import repair
from tailreplay.engines.vllm.calibration import OPTIONS, SALT, calibrate
from tailreplay.engines.vllm.middleware import ReuseParams
from tailreplay.engines.vllm.settings import Settings, parse_options
from tailreplay.errors import InvalidRequestError
from tests.vllm_plain.test_repair import App, ask, settle


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair, "_IDLE_SECONDS", 0.0)
    repair.APPROXIMATE.clear()


class Picky(App):
    """Refuses some of what it is asked for the mean state."""

    def __init__(self, *statuses: int) -> None:
        super().__init__()
        self.statuses = list(statuses)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def answer(message: Any) -> None:
            refused = self.statuses and self.asked[-1].get("cache_salt") == SALT
            await send({**message, "status": self.statuses.pop(0)} if refused else message)

        await super().__call__(scope, receive, answer)


async def reset(middleware: ReuseParams) -> None:
    async def nothing(message: Any = None) -> Any:
        return {"type": "http.request", "body": b"{}"}

    headers = [(b"content-length", b"2")]
    await middleware(
        {"type": "http", "method": "POST", "path": "/reset_prefix_cache", "headers": headers}, nothing, nothing
    )


def texts(app: App) -> list[int]:
    return [len(asked["prompt"]) for asked in app.asked if asked.get("cache_salt") == SALT]


def test_it_is_asked_for_twice_after_the_first_request_and_after_a_reset() -> None:
    async def main() -> None:
        app = App()
        middleware = ReuseParams(app)
        await ask(middleware, messages=[{"role": "user", "content": "hi"}])
        await settle(middleware)
        assert len(app.asked) == 3
        assert app.asked[1] == app.asked[2]
        assert {**app.asked[1], "prompt": ""} == {
            "prompt": "", "max_tokens": 1, "cache_salt": SALT, "kv_transfer_params": OPTIONS,
        }  # fmt: skip
        assert app.names[1:] == ["", ""]
        await ask(middleware, prompt=[1])
        await settle(middleware)
        assert len(app.asked) == 4, "once is enough"
        await reset(middleware)
        await ask(middleware, prompt=[1])
        await settle(middleware)
        assert len(texts(app)) == 4

    asyncio.run(main())


def test_it_makes_room_at_once_and_goes_on_later() -> None:
    async def main() -> None:
        app = App()
        middleware = ReuseParams(app)
        await ask(middleware, prompt=[1])
        app.hold = asyncio.Event()
        async with asyncio.timeout(60):
            while len(app.asked) < 2:
                await asyncio.sleep(0)
        app.hold = None
        await ask(middleware, prompt=[2])
        await settle(middleware)
        assert app.ended == ["done", "done", "gone", "done", "done"]
        assert len(texts(app)) == 3

    asyncio.run(main())


@pytest.mark.parametrize(
    ("statuses", "shares"),
    [((400, 400), [1, 2, 4, 4]), ((401,), [1, 1, 1]), ((400,) * 9, [1, 2, 4, 8]), ((200, 503), [1, 1, 1])],
)
def test_a_text_that_is_refused_is_shortened_or_asked_with_other_headers(
    statuses: tuple[int, ...], shares: list[int]
) -> None:
    async def main() -> None:
        app = Picky(*statuses)
        middleware = ReuseParams(app)
        for _ in range(3):
            await ask(middleware, prompt=[1])
            await settle(middleware)
        found = texts(app)
        assert found == [found[0] // share for share in shares]

    asyncio.run(main())


def test_only_the_server_itself_may_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        app = App()
        await ask(ReuseParams(app), prompt=[1], tailreplay={"calibrate": True})
        assert not app.asked
        monkeypatch.setenv("TAILREPLAY_REPAIR", "0")
        await ask(ReuseParams(app), prompt=[1])
        assert not texts(app)

    asyncio.run(main())


def test_such_a_request_takes_exact_pages_and_no_saved_states() -> None:
    options = parse_options(OPTIONS["tailreplay"], Settings(replay="off"))
    assert (options.calibrates, options.store, options.reuse.anchors, options.reuse.ratio) == (True, True, False, 1.0)
    assert options.reuse.terms.depth == 0
    for wrong in ({"calibrate": False}, {"calibrate": True, "mode": "exact"}):
        with pytest.raises(InvalidRequestError, match="goes alone"):
            parse_options(wrong, Settings())


def test_by_hand_a_text_is_cut_to_what_the_model_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "vllm", SimpleNamespace(SamplingParams=dict))
    asked: list[Any] = []
    llm = SimpleNamespace(
        get_tokenizer=lambda: SimpleNamespace(encode=lambda text, **_: list(range(len(text)))),
        llm_engine=SimpleNamespace(model_config=SimpleNamespace(max_model_len=1000)),
        generate=lambda prompts, params, **_: asked.append((*prompts, params)),
    )
    calibrate(llm)
    assert asked[0] == asked[1]
    prompt, params = asked[0]
    assert (len(prompt["prompt_token_ids"]), prompt["cache_salt"]) == (999, SALT)
    assert json.loads(json.dumps(params["extra_args"])) == {"kv_transfer_params": OPTIONS}
    calibrate(llm, "short")
    assert len(asked[2][0]["prompt_token_ids"]) == 5
