"""The guard around a tier that hangs, fails, recovers: nobody waits longer than the deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from tailreplay.tiers.base import KV, TierError, TierFullError, Usage
from tailreplay.tiers.guard import Guarded
from tailreplay.tiers.guard.lanes import Lanes, Overdue
from tests.tiers.fakes import LONG, Clock, Fake, Hang
from tests.tiers.remote_pages import name, page

SHORT = 0.05


def refuse() -> None:
    raise TierError("It is full.")


@pytest.fixture
def fake() -> Fake:
    return Fake()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def hang() -> Iterator[Hang]:
    made = Hang()
    yield made
    made.release()


def test_calls_go_through(fake: Fake) -> None:
    guarded = Guarded(fake, deadline=LONG)
    assert guarded.name == "fake"
    assert guarded.contains([name(0)]) == [None]
    assert guarded.resolve([b"h"]) == [b"h"]
    assert [bytes(view or b"") for view in guarded.get([name(0), name(1)], KV)] == [fake.value] * 2
    guarded.put([page(0)])
    guarded.replace([page(0)])
    guarded.drop([name(0)])
    assert guarded.usage() == Usage(1, 2, 3)
    guarded.close()
    guarded.close()
    # The first get of all is of one page, to learn its size.
    assert fake.seen == ["contains", "resolve", "get", "get", "put", "replace", "drop", "usage", "close"]
    with pytest.raises(TierError, match="closed"):
        guarded.usage()


def test_a_call_that_hangs_is_given_up_and_the_tier_left_alone(
    fake: Fake, clock: Clock, hang: Hang, caplog: pytest.LogCaptureFixture
) -> None:
    guarded = Guarded(fake, deadline=SHORT, clock=clock)
    fake.before = hang
    with pytest.raises(TierError, match=r"fake does not answer: no answer within 0.05 s"):
        guarded.contains([name(0)])
    assert (guarded.is_down, guarded.hung) == (True, 1)
    for call in (lambda: guarded.contains([name(0)]), lambda: list(guarded.get([name(0)], KV)), guarded.usage):
        with pytest.raises(TierError, match="fake is down"):
            call()
    assert fake.seen == ["contains"], "it was not touched"
    assert len(caplog.records) == 1
    counts = guarded.counts()
    assert (counts["contains"].calls, counts["contains"].timeouts, counts["contains"].failures) == (1, 1, 1)
    assert (counts["contains"].refused, counts["get"].refused, counts["usage"].refused) == (1, 1, 1)
    assert counts["contains"].seconds >= SHORT


def test_it_is_tried_again_after_a_back_off_that_doubles(
    fake: Fake, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    guarded = Guarded(fake, deadline=LONG, clock=clock)
    fake.before = refuse
    for seconds in (1, 2, 4, 8, 16, 32, 60, 60):
        with pytest.raises(TierError, match="full"):
            guarded.usage()
        clock.now += seconds - 0.01
        with pytest.raises(TierError, match=r"is down \(It is full\)"):
            guarded.usage()
        clock.now += 0.02
    fake.before = lambda: None
    assert guarded.usage() == Usage(1, 2, 3)
    assert not guarded.is_down
    assert [record.getMessage().split(",")[0].split(" after")[0] for record in caplog.records] == [
        "fake is down",
        "fake is back",
    ]
    fake.before = refuse
    with pytest.raises(TierError, match="full"):
        guarded.usage()
    clock.now += 1.01
    fake.before = lambda: None
    guarded.usage()


def test_only_one_call_tries_it_again(fake: Fake, clock: Clock, hang: Hang) -> None:
    guarded = Guarded(fake, deadline=LONG, clock=clock)
    fake.before = refuse
    with pytest.raises(TierError):
        guarded.usage()
    clock.now = 1.5
    fake.before = hang
    trial = threading.Thread(target=guarded.usage)
    trial.start()
    assert hang.entered.acquire(timeout=LONG)
    with pytest.raises(TierError, match="is down"):
        guarded.usage()
    hang.release()
    trial.join(LONG)
    assert not guarded.is_down


def test_an_error_of_any_kind_is_a_tier_error(fake: Fake) -> None:
    def break_it() -> None:
        raise ZeroDivisionError("by zero")

    fake.before = break_it
    with pytest.raises(TierError, match="fake failed: by zero") as caught:
        Guarded(fake, deadline=LONG).usage()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_full_tier_is_not_down(fake: Fake) -> None:
    def full() -> None:
        raise TierFullError("It is full.")

    fake.before = full
    guarded = Guarded(fake, deadline=LONG)
    with pytest.raises(TierFullError):
        guarded.put([page(0)])
    assert not guarded.is_down
    assert guarded.counts()["put"].failures == 1


def test_each_page_of_get_has_the_deadline_and_one_that_comes_late_is_given_to_nobody(fake: Fake, hang: Hang) -> None:
    guarded = Guarded(fake, deadline=LONG, batch_bytes=1 << 30)
    guarded.put([page(0, nbytes=128)])
    views = guarded.get([name(0), name(1), name(2)], KV)
    assert next(views) is not None
    fake.item, guarded._deadline = hang, SHORT
    with pytest.raises(TierError, match="does not answer"):
        next(views)
    assert list(views) == []
    assert guarded.hung == 1
    hang.release()
    assert fake.ended.wait(LONG), "what was abandoned is closed once it returns"
    assert guarded.counts()["get"].timeouts == 1


def test_the_time_of_the_caller_between_pages_does_not_count(fake: Fake, hang: Hang) -> None:
    guarded = Guarded(fake, deadline=LONG)
    views = guarded.get([name(0), name(1)], KV)
    next(views)
    assert guarded.contains([name(3)]) == [None], "another call goes on beside it"
    assert len(list(views)) == 1


def test_a_get_that_is_left_midway_is_closed(fake: Fake) -> None:
    guarded = Guarded(fake, deadline=LONG, threads=1)
    guarded.put([page(0, nbytes=128)])
    views = guarded.get([name(0), name(1)], KV)
    next(views)
    views.close()  # type: ignore[attr-defined]
    assert fake.ended.wait(LONG)
    assert guarded.usage() == Usage(1, 2, 3), "its thread is free again"


def test_a_tier_that_returns_too_few_pages_is_an_error(fake: Fake) -> None:
    guarded = Guarded(fake, deadline=LONG)

    def end() -> Iterator[memoryview | None]:
        return iter(())

    fake.get = lambda keys, part: end()  # type: ignore[method-assign]
    with pytest.raises(TierError, match="fewer pages"):
        list(guarded.get([name(0)], KV))


def test_hung_calls_take_no_more_threads_than_agreed_and_it_stays_down_until_one_returns(
    fake: Fake, clock: Clock, hang: Hang
) -> None:
    guarded = Guarded(fake, deadline=SHORT, threads=2, clock=clock)
    fake.before = hang
    for _ in range(2):
        with pytest.raises(TierError, match="does not answer"):
            guarded.usage()
        clock.now += 100
    before = threading.active_count()
    for _ in range(5):
        with pytest.raises(TierError, match="is down"):
            guarded.usage()
        clock.now += 100
    assert (threading.active_count(), len(fake.seen), guarded.hung) == (before, 2, 2)
    hang.release()
    fake.before = lambda: None
    wait_until(lambda: guarded.hung == 0)
    guarded._deadline = LONG
    assert guarded.usage() == Usage(1, 2, 3)


def test_callers_wait_for_a_thread_no_longer_than_the_deadline(fake: Fake, hang: Hang) -> None:
    guarded = Guarded(fake, deadline=LONG, threads=1)
    fake.before = hang
    busy = threading.Thread(target=guarded.usage)
    busy.start()
    assert hang.entered.acquire(timeout=LONG)
    guarded._deadline = SHORT
    with pytest.raises(TierError, match="fake is busy"):
        guarded.usage()
    assert not guarded.is_down, "the tier may be well"
    hang.release()
    busy.join(LONG)


def test_close_does_not_wait_for_calls_that_hang(
    fake: Fake, hang: Hang, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tailreplay.tiers.guard.guarded.CLOSE_SECONDS", SHORT)
    guarded = Guarded(fake, deadline=SHORT, threads=1)
    fake.before = hang
    with pytest.raises(TierError):
        guarded.usage()
    guarded.close()
    assert "fake does not close" in caplog.text


def test_batches_are_cut_by_bytes_and_keys(fake: Fake) -> None:
    guarded = Guarded(fake, deadline=LONG, batch_bytes=10_000)
    fake.value = b"x" * 4096
    guarded.put([page(n, [KV]) for n in range(5)])
    assert fake.batches == [2, 2, 1]
    fake.batches.clear()
    assert len(list(guarded.get([name(n) for n in range(5)], KV))) == 5
    assert fake.batches == [2, 2, 1]
    fake.batches.clear()
    guarded.contains([name(n) for n in range(1000)])
    assert fake.batches == [512, 488]
    assert guarded.counts()["get"].calls == 3
    assert guarded.counts()["get"].nbytes == 5 * 4096
    assert guarded.counts()["put"].nbytes > 5 * 4096


def test_the_first_get_asks_for_one_page_to_learn_its_size(fake: Fake) -> None:
    guarded = Guarded(fake, deadline=LONG)
    list(guarded.get([name(n) for n in range(5)], KV))
    assert fake.batches == [1, 4]


def test_a_bigger_page_has_more_time(fake: Fake) -> None:
    guarded = Guarded(fake, deadline=SHORT, batch_bytes=100)
    seconds: list[float] = []
    take = guarded._lanes.take

    def noted(wait: float) -> object:
        lane = take(wait)
        run = lane.run
        lane.run = lambda call, limit, late=None: (seconds.append(limit), run(call, LONG, late))[1]  # type: ignore
        return lane

    guarded._lanes.take = noted  # type: ignore[method-assign,assignment]
    guarded.put([page(0, [KV], nbytes=4096)])
    assert seconds[0] > 40 * SHORT


def test_many_threads_at_once(fake: Fake) -> None:
    guarded = Guarded(fake, deadline=LONG, threads=3)
    results: list[int] = []

    def work() -> None:
        for _ in range(50):
            results.append(len(list(guarded.get([name(0), name(1)], KV))))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert results == [2] * 400
    assert guarded.counts()["get"].failures == 0
    guarded.close()


def test_a_lane_whose_call_returns_late_is_used_again_once(hang: Hang) -> None:
    lanes = Lanes("test", 1)
    lane = lanes.take(LONG)
    late = threading.Event()
    with pytest.raises(Overdue):
        lane.run(hang, SHORT, late.set)
    with pytest.raises(Overdue):
        lanes.take(SHORT)
    hang.release()
    again = lanes.take(LONG)
    assert late.is_set()
    lane.free()
    with pytest.raises(Overdue):
        lanes.take(SHORT)
    again.free()
    assert lanes.take(LONG).run(lambda: 5, LONG) == 5


def wait_until(true: Callable[[], bool]) -> None:
    """Return when `true` is; looks again whenever another thread may have run."""
    pause = threading.Event()
    for _ in range(3000):
        if true():
            return
        pause.wait(0.01)
    raise AssertionError("it never came true")
