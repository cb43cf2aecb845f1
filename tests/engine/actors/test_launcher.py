"""Tests of the driver's side of one worker's actor."""

from __future__ import annotations

import sys
import threading
import weakref
from types import SimpleNamespace

import pytest

from luminosity.engine.actors.launcher import ActorProcess
from luminosity.engine.resources.nodes import ActorNeeds
from tests.processes import wait_for


class _Run:
    """What a worker's end is reported to."""

    def __init__(self) -> None:
        self.codes: list[int] = []

    def on_exit(self, code: int) -> None:
        self.codes.append(code)


@pytest.mark.parametrize("is_killed_first", [True, False])
def test_a_worker_that_has_ended_holds_no_run_and_no_timer(
    is_killed_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[object] = []
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(kill=lambda actor, **_: killed.append(actor)))
    run, actor = _Run(), object()
    process = ActorProcess("w1", actor, ActorNeeds(cpus=1, memory=0, gpus=0), run.on_exit)
    steps = [process.kill, lambda: process.ended(-9)]
    for step in steps if is_killed_first else reversed(steps):
        step()
    process.ended(0)
    process.kill()
    assert killed == [actor]
    assert run.codes == [-9]
    left = weakref.ref(run)
    del run
    assert wait_for(lambda: left() is None, timeout_s=60)
    assert wait_for(lambda: not [t for t in threading.enumerate() if isinstance(t, threading.Timer)], timeout_s=60)
