"""Compute threads that have nothing to do leave the cores to others."""

from __future__ import annotations

import sys

import pytest

from jubako.engine import threads
from jubako.engine.threads import set_own_wait_policy, set_wait_policy


def test_a_short_spin_unless_the_user_says_otherwise() -> None:
    environment: dict[str, str] = {}
    set_wait_policy(environment)
    assert environment == {"GOMP_SPINCOUNT": str(threads.SPIN_COUNT)}
    for own in ({"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}):
        environment = dict(own)
        set_wait_policy(environment)
        assert environment == own


def test_once_pytorch_is_loaded_it_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    environment: dict[str, str] = {}
    monkeypatch.setattr(threads.os, "environ", environment)
    monkeypatch.setitem(sys.modules, "torch", sys)
    set_own_wait_policy()
    assert environment == {}
    monkeypatch.delitem(sys.modules, "torch")
    set_own_wait_policy()
    assert environment
