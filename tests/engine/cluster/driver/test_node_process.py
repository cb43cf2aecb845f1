"""Tests of the driver's side of one worker on a node."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import pytest

from luminosity.engine.cluster.driver.leases import NodeProcess
from luminosity.engine.resources.machine import LeaseNeeds
from tests.processes import wait_for


class _Run:
    """What happens to a worker is reported to it."""

    def __init__(self) -> None:
        self.codes: list[int] = []

    def on_exit(self, code: int) -> None:
        self.codes.append(code)


@pytest.mark.parametrize("is_killed_first", [True, False])
def test_a_worker_ends_once_and_holds_no_run_and_no_timer_then(is_killed_first: bool) -> None:
    run, killed, ended = _Run(), list[NodeProcess](), list[NodeProcess]()
    needs = LeaseNeeds(cpus=1, memory=0, gpus=0)
    process = NodeProcess("w1", needs, on_exit=run.on_exit, on_killed=killed.append, on_ended=ended.append)
    steps: list[Callable[[], None]] = [process.kill, lambda: process.ended(-9)]
    for step in steps if is_killed_first else reversed(steps):
        step()
    process.ended(0)
    process.kill()
    assert killed == ([process] if is_killed_first else [])  # there is nothing to kill after its end
    assert ended == [process]
    assert run.codes == [-9]
    left = weakref.ref(run)
    del run
    assert wait_for(lambda: left() is None, timeout_s=60)
    assert wait_for(lambda: not [t for t in threading.enumerate() if isinstance(t, threading.Timer)], timeout_s=60)
