"""CPU pools lend each other cores that are idle."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import apache_beam as beam
import pytest

from luminosity.engine.data.world import WallClock
from luminosity.engine.loop.bundle import Bundle
from luminosity.engine.loop.workers import PoolRun, Worker
from luminosity.engine.resources.pools import Pool
from tests.runners import IS_REFERENCE, collect, new_pipeline

pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(IS_REFERENCE, reason="it has no pools")]

# All that a pool looks at.
BUSY = cast(Bundle, SimpleNamespace(is_suspect=False, stage=SimpleNamespace(id="step", is_source=False)))
WAITING = cast(Bundle, SimpleNamespace(is_suspect=False, stage=SimpleNamespace(id="source", is_source=True)))
_WAIT_S = 120.0  # far above what a loaded machine takes


class _MeetInTwoProcesses(beam.DoFn):
    """Each of two elements waits until the other is processed as well, which takes two workers at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def process(self, element: int) -> Iterator[int]:
        (self._folder / str(os.getpid())).touch()
        deadline = time.monotonic() + _WAIT_S
        while len(os.listdir(self._folder)) < 2:
            if time.monotonic() > deadline:
                raise TimeoutError("the other element was not processed at the same time")
            time.sleep(0.01)
        yield element


def _pools(*cores: float) -> list[PoolRun]:
    plans = [Pool(f"cpu {c}", c, 0, 1, (), 1, (), borrowed=int((sum(cores) - c) / c)) for c in cores]
    pools = [PoolRun(plan, first_writer=10 * i, clock=WallClock()) for i, plan in enumerate(plans)]
    for pool in pools:
        pool.cpu_pools = pools
    return pools


def _start(pool: PoolRun, index: int = 0) -> Worker:
    worker = pool.workers[index] = Worker(pool, index)
    worker.is_connected = True
    return worker


def test_cores_are_borrowed_only_while_they_are_idle() -> None:
    one, other = _pools(1.0, 1.0)
    own, lender = _start(one), _start(other)
    own.bundles["bundle"] = BUSY
    assert one.may_borrow()
    borrowed = _start(one, index=1)
    assert borrowed.free_slots() == 1
    lender.bundles["source"] = WAITING
    assert borrowed.free_slots() == 1
    lender.bundles["bundle"] = BUSY
    assert borrowed.free_slots() == 0
    assert not one.may_borrow()


def test_a_stage_stays_with_the_worker_that_has_run_it() -> None:
    """A worker that connects later gets a bundle only if the first is busy, or runs on a borrowed core."""
    pool = PoolRun(Pool("cpu", 1.0, 0, 1, (), 2, (), borrowed=1), first_writer=0, clock=WallClock())
    pool.cpu_pools = [pool]
    later, warm, borrowed = (_start(pool, index) for index in range(3))
    warm.warm_stages.add("step")
    assert pool.free_worker("step", 1, is_idle=False) is warm
    assert pool.free_worker("other", 1, is_idle=False) is later
    warm.bundles["bundle"] = BUSY
    borrowed.warm_stages.add("step")
    assert pool.free_worker("step", 1, is_idle=False) is later


def test_a_source_takes_no_borrowed_worker() -> None:
    """The rest of its restriction would wait there until the core is idle again, and hold the watermark back."""
    one, other = _pools(1.0, 1.0)
    _start(one)
    borrowed = _start(one, index=1)
    assert borrowed.free_slots() == 1
    assert [worker.index for worker in one.free_workers("source", 4, is_idle=False, is_source=True)] == [0]
    _start(other).bundles["bundle"] = one.workers[0].bundles["bundle"] = BUSY
    assert not borrowed.free_slots()
    assert [worker.index for worker in one.free_workers("source", 4, is_idle=False, is_source=True)] == [0]


def test_a_borrowed_worker_counts_as_one_of_the_pool() -> None:
    one, _ = _pools(1.0, 1.0)
    assert one.most_workers() == 1
    _start(one)
    _start(one, index=1)
    assert one.most_workers() == 2


def test_a_worker_that_takes_two_cores_borrows_two() -> None:
    large, small, another = _pools(2.0, 1.0, 1.0)
    _start(large).bundles["bundle"] = BUSY
    assert large.may_borrow()
    _start(small).bundles["bundle"] = BUSY
    assert not large.may_borrow()
    assert another.may_borrow()


def test_a_pool_runs_a_second_worker_on_the_core_of_an_idle_pool(tmp_path: Path) -> None:
    meeting = tmp_path / "meeting"
    meeting.mkdir()

    def build(pipeline: beam.Pipeline) -> Any:
        # Two pools on two cores: a worker each. The first pool has nothing to do when the second works.
        large = beam.ParDo(_MeetInTwoProcesses(meeting)).with_resource_hints(min_ram="50MB")
        return pipeline | beam.Create([1, 2]) | "Large" >> large

    assert sorted(collect(build, tmp_path, new_pipeline("--cpu_workers=2"))) == [1, 2]
