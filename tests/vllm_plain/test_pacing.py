"""Budgets of replay beside decoding."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailreplay.engines.vllm.pacing import FIRST, LEAST, Pacer


def test_without_anybody_decoding_there_is_one_limit() -> None:
    assert Pacer(0.5, 2048).budget(decoding=False) == 2048
    assert Pacer(0.0, 2048).budget(decoding=True) == 2048
    assert Pacer(0.5, 2048).budget(decoding=True) == FIRST
    assert Pacer(0.5, 16).budget(decoding=True) == 16


@given(
    quiet=st.floats(0.005, 0.5),
    token=st.floats(1e-5, 0.01),
    fixed=st.floats(0, 3, allow_subnormal=False),  # other tests turn subnormal numbers off
    share=st.floats(0.1, 1.0),
)
def test_the_budget_settles_where_a_step_gets_longer_by_the_share(
    quiet: float, token: float, fixed: float, share: float
) -> None:
    """`fixed` is what any replay costs, in quiet steps."""
    pacer = Pacer(share, 2048)
    for _ in range(5):
        pacer.observe(quiet, 0)
    tokens = 0
    for _ in range(60):
        tokens = pacer.budget(decoding=True)
        assert LEAST <= tokens <= 2048
        pacer.observe(quiet + fixed * quiet + tokens * token, tokens)
    extra = fixed * quiet + tokens * token
    if fixed < 0.4 * share:
        assert extra <= 1.3 * share * quiet or tokens == LEAST
        assert extra >= 0.7 * share * quiet - token or tokens == 2048
    # What any replay costs is never most of what is paid for one, whatever the share.
    assert tokens * token >= 0.25 * fixed * quiet - token or tokens == 2048


def test_it_follows_a_machine_that_changes() -> None:
    pacer = Pacer(0.5, 2048)
    for seconds in (0.1, 0.2):
        for _ in range(30):
            pacer.observe(seconds, 0)
        for _ in range(10):
            tokens = pacer.budget(decoding=True)
            pacer.observe(seconds + tokens * 0.001, tokens)
        assert pacer.budget(decoding=True) == pytest.approx(0.5 * seconds / 0.001, rel=0.1)
