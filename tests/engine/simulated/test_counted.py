"""The real loop with elements that are numbers: what comes in is done once, whatever happens to the workers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from luminosity._shared.text import LOST_WITH_NODE
from luminosity.engine.loop.parts import RunParts
from luminosity.engine.loop.scheduler import Scheduler
from luminosity.engine.simulated.counted.parts import CountedPool, CountedStage, counted_parts, give_workers
from luminosity.engine.simulated.counted.workers import CountedCrew, Flow
from luminosity.engine.simulated.virtual_time import VirtualTime

_ELEMENT_S = 0.01
_START_S = 2.0


class _Costs:
    """Each element takes the same time, except in the bundles that ``slow`` picks."""

    def __init__(self, slow: Callable[[], bool] = lambda: False) -> None:
        self.bundles: list[int] = []
        self.running = 0
        self._slow = slow

    def start(self, pool: str) -> tuple[float, float]:
        return _START_S, 0.0

    def bundle(self, stage: str, elements: int) -> float:
        self.bundles.append(elements)
        return elements * _ELEMENT_S * (10.0 if self._slow() else 1.0)

    def begin(self, stage: str) -> float:
        self.running += 1
        return 1.0

    def ended(self, stage: str) -> None:
        self.running -= 1

    def kept(self, stage: str, elements: int, seconds: float, elapsed: float) -> float:
        return 0.0


class _Listener:
    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


_STAGES = (
    CountedStage("read", "Read", "cpu", 3000),
    CountedStage("even", "Even", "cpu", 1001, ("read",), queue=200),
    CountedStage("all", "All", "cpu", 10, ("read", "even"), waits_for=("read", "even")),
)


def _run(
    costs: _Costs, workers: int, prepare: Callable[[VirtualTime, CountedCrew, RunParts], None] = lambda *_: None
) -> tuple[float, RunParts, CountedCrew]:
    """Run three stages to their end. Return how long that took, the parts, and the workers."""
    time = VirtualTime()
    crew = CountedCrew(time, costs)
    parts = counted_parts(_STAGES, (CountedPool("cpu", workers, 2 * workers, is_ahead=True),), time, crew)
    prepare(time, crew, parts)
    listener: Any = _Listener()
    Scheduler(parts, listener).run()
    return time.now, parts, crew


def _assert_done(parts: RunParts, costs: _Costs) -> None:
    assert {stage.id: stage.elements_done for stage in parts.stages} == {"read": 3000, "even": 1001, "all": 10}
    assert not costs.running
    assert all(not buffer.uncommitted_bytes for buffer in parts.buffers.values())


def test_each_element_is_done_once_and_takes_its_time() -> None:
    costs = _Costs()
    seconds, parts, crew = _run(costs, workers=4)
    _assert_done(parts, costs)
    work = 4011 * _ELEMENT_S
    assert crew.busy_seconds("cpu") == pytest.approx(work)
    assert _START_S + work / 4 < seconds < 1.1 * (_START_S + work / 4)
    assert crew.paid_seconds("cpu") == pytest.approx(4 * (seconds - _START_S), rel=1e-4)
    assert not crew.workers


def test_idle_workers_take_from_slow_bundles() -> None:
    chance = random.Random(7)
    costs = _Costs(lambda: chance.random() < 0.1)
    seconds, parts, crew = _run(costs, workers=4)
    _assert_done(parts, costs)
    assert sum(costs.bundles) == 4011  # what splits give back is as slow as before
    # One slow bundle takes a hundred seconds if nothing is taken from it.
    assert seconds < _START_S + 2 * crew.busy_seconds("cpu") / 4


@pytest.mark.parametrize("code", [-9, LOST_WITH_NODE])
def test_bundles_of_lost_workers_are_done_again(code: int) -> None:
    def lose_some(time: VirtualTime, crew: CountedCrew, parts: RunParts) -> None:
        def lose() -> None:
            next(worker for worker in crew.workers if worker.is_up and not worker.is_idle).die(code)

        for at in (3.0, 5.0, 7.0):
            time.at(at, lose)

    costs = _Costs()
    _, parts, crew = _run(costs, workers=2, prepare=lose_some)
    _assert_done(parts, costs)
    assert sum(stage.usage.failed for stage in parts.stages) == 3
    assert crew.busy_seconds("cpu") > 4011 * _ELEMENT_S  # what was lost is in it


def test_a_pool_grows_and_shrinks_and_gets_faster() -> None:
    def change(time: VirtualTime, crew: CountedCrew, parts: RunParts) -> None:
        (pool,) = parts.pools

        def shrink() -> None:
            give_workers(pool, 1)

        time.at(4.0, lambda: give_workers(pool, 4))
        time.at(8.0, shrink)
        time.at(10.0, lambda: crew.quicken("cpu", 2.0))

    costs = _Costs()
    _, parts, crew = _run(costs, workers=2, prepare=change)
    _assert_done(parts, costs)
    assert crew.paid_seconds("cpu") > crew.busy_seconds("cpu")
    assert len(parts.pools[0].worker_busy) == 4  # as many as it may ever have
    assert sum(busy.seconds > 0 for busy in parts.pools[0].worker_busy) == 4


def test_what_a_stage_sends_adds_up() -> None:
    flow = Flow("write", elements=10, element_bytes=64)
    assert [flow.due(done, 3) for done in (1, 2, 3)] == [3, 3, 4]
