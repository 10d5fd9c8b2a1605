"""A Mooncake master that hangs, dies and comes back, seen by a process of its own: a crash there is an exit status here."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.tiers import servers
from tests.tiers.children import go_on, start_child, until
from tests.tiers.conftest import require

OUTAGE = """
import os, signal, time, threading
from tests.tiers.remote_pages import page, name, hint
tier = MooncakeTier(target, lend="32MiB", buffer="8MiB", timeout=0.3)

def outcome(call):
    began = time.monotonic()
    try:
        result = call()
    except TierError as error:
        result = "TierError"
    assert time.monotonic() - began < 5, time.monotonic() - began
    return result

def step(text):
    print(text, flush=True)
    return input()

print(outcome(lambda: tier.contains([name(0)])))
step("hung at start")
print(outcome(lambda: tier.put([page(0)])), bytes(next(tier.get([name(0)], "kv"))) == b"".join(page(0).parts["kv"]))
step("up")
for call in (lambda: tier.contains([name(0)]), lambda: list(tier.get([name(0)], "kv")), lambda: tier.put([page(1)])):
    print(outcome(call))
step("dead")
end = time.monotonic() + 20
while outcome(lambda: tier.put([page(0)])) == "TierError":
    assert time.monotonic() < end
    time.sleep(0.1)
print(tier.contains([name(0)])[0] is not None)
step("back")
call = threading.Thread(target=lambda: outcome(lambda: tier.contains([name(0)])))
call.start()
print(outcome(lambda: tier.contains([name(0)])))
tier.close()
call.join()
print(outcome(lambda: tier.contains([name(0)])), outcome(lambda: tier.put([page(0)])))
step("closed")
"""


def test_a_master_that_hangs_dies_and_comes_back(tmp_path: Path) -> None:
    require("mooncake")
    server = servers.mooncake_server(tmp_path)
    server.signal(signal.SIGSTOP)
    child = start_child(OUTAGE, f"127.0.0.1:{server.ports[0]}")
    try:
        assert until(child, "hung at start") == ["TierError"]
        server.signal(signal.SIGCONT)
        go_on(child)
        assert until(child, "up") == ["None True"]
        server.kill()
        go_on(child)
        assert until(child, "dead") == ["TierError"] * 3
        server.start()
        go_on(child)
        assert until(child, "back") == ["True"]
        server.signal(signal.SIGSTOP)
        go_on(child)
        assert until(child, "closed") == ["TierError", "TierError TierError"]
        go_on(child)
        assert child.wait(30) == 0
    finally:
        child.kill()
        server.kill()
