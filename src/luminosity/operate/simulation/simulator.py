"""Simulates a run: the engine's own loop in virtual time, with workers whose bundles take the measured time."""

from __future__ import annotations

import contextlib
import logging
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from luminosity._shared.text import LOST_WITH_NODE
from luminosity.engine.loop.scheduler import Scheduler
from luminosity.engine.loop.workers import PoolRun, Worker
from luminosity.engine.reporting.statuses import Statuses
from luminosity.engine.simulated.counted.parts import (
    MOST_ELEMENTS,
    CountedPool,
    CountedStage,
    counted_parts,
    give_workers,
)
from luminosity.engine.simulated.counted.workers import CountedCrew, CountedWorker
from luminosity.engine.simulated.virtual_time import VirtualTime
from luminosity.errors import OptionError
from luminosity.operate.simulation.workload import PoolModel, StageModel, Workload

__all__ = ["Outcome", "Point", "run"]

LOOK_EVERY_S = 30.0  # how often an autoscaler looks, as Dataflow's does

_MOST_WORKERS = 100  # of a pool, as the loop sees them: each stands for several in a larger pool
_WORKER_SECONDS = 300.0  # of busy workers, as the loop sees them: a simulation of them takes about a second
_SHORTEST_S = 3.0  # of a run, as the loop sees it: much longer than the times by which the loop looks at its workers
_LONGEST_RUN_S = 600.0  # the same for few workers, whose bundles are few
_LEAST_ELEMENT_S = 1e-5  # of work, as the loop sees it, so that it can tell how long an element takes
# What a queue holds at least where bundles stand for many: so much work of all workers, as the loop sees it, but not
# more than a part of the run. With less, workers would wait for input that the real run has.
_QUEUE_S = 5.0
_QUEUE_PART = 0.25
_CATCH_UP_S = 0.01  # as long as the loop lets messages gather
_TICK_S = 1e-9  # in compressed time, where a microsecond would be a millisecond
_POINTS = 240  # over the run, for the picture
_SUMMED_DRAWS = 12  # bundles that are drawn one by one; the mean of more is close to a normal distribution
_LONGEST_S = 10 * 365 * 86_400.0  # a simulation that gets here makes no progress
_MOST_LOST = 100_000  # workers: each takes some time to simulate
_KILLED = -9  # the exit code of a worker that is lost at a given time


@dataclass(frozen=True)
class Point:
    """The state at one moment."""

    seconds: float
    workers: dict[str, int]  # by pool: up or starting
    busy: dict[str, float]  # by pool: workers that ran a bundle, on average since the point before
    done: float  # the share of all work


@dataclass(frozen=True)
class Outcome:
    """What one simulated run took."""

    seconds: float
    worker_seconds: dict[str, float]  # by pool: from the start of a worker until its end, as bills count them
    busy_seconds: dict[str, float]  # by pool
    most_workers: dict[str, int]  # by pool
    lost_workers: int
    states: dict[str, dict[str, float]]  # by stage: the shares of its time in which it was busy, starved and so on
    points: tuple[Point, ...]


def run(workload: Workload, seed: int = 0) -> Outcome:
    """Simulate a run. The same seed gives the same outcome."""
    return _Simulation(workload, seed).run()


class _Listener:
    """Hears of everything that happens in the loop, and passes on that it is about to end its workers."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end

    def worker_ends(self, worker: Worker) -> None:
        self._on_end()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _ignore


def _ignore(*_: object) -> None:
    pass


class _MeasuredCosts:
    """The times of bundles and of starts of workers, as measured, in the time of the loop.

    ``speed`` is how many seconds of the run pass in one second of the loop's time.
    """

    def __init__(self, workload: Workload, speed: float, chance: random.Random, time: VirtualTime) -> None:
        self._workload = workload
        self._speed = speed
        self._chance = chance
        self._time = time
        self._models = {model.id: model for model in workload.stages}
        self._pools = {model.name: model for model in workload.pools}
        self._spread = {model.id: self._bootstrapped(model) for model in workload.stages}
        self.elements = {model.id: _elements(model, workload, speed) for model in workload.stages}
        self._demand = 0.0  # cores that running bundles use
        # By pool: how many workers one worker of the loop stands for.
        self.sizes = {model.name: _size(_first_workers(model)) for model in workload.pools}
        self._starts_at = dict.fromkeys(self._pools, 0.0)  # by pool: when the next worker may begin to start

    def start(self, pool: str) -> tuple[float, float]:
        """Return how long a worker takes to start, after those that start already, and to load its models then."""
        model, now = self._pools[pool], self._time.now
        begins = max(now, self._starts_at[pool])
        self._starts_at[pool] = begins + model.start_gap * self.sizes[pool] / self._speed
        return begins - now + model.startup_seconds / self._speed, model.load_seconds / self._speed

    def bundle(self, stage: str, elements: int) -> float:
        """Return how long so many elements of a bundle take in a worker that has enough cores."""
        model = self._models[stage]
        rows = elements * self._workload.rows / self.elements[stage]
        return rows * model.seconds_per_row / (self._speed * self.sizes[model.pool]) * self._drawn(model, rows)

    def begin(self, stage: str) -> float:
        """Note that a bundle begins. Returns how many times as long it takes because of cores that others use."""
        model = self._models[stage]
        self._demand += model.cores * self.sizes[model.pool]
        if self._demand <= self._workload.cores or not model.cores:
            return 1.0
        # Only the computing part of a bundle waits for a core.
        return 1 + min(1.0, model.cores) * (self._demand / self._workload.cores - 1)

    def ended(self, stage: str) -> None:
        """Note that a bundle has ended, or was lost."""
        model = self._models[stage]
        self._demand = max(0.0, self._demand - model.cores * self.sizes[model.pool])

    def kept(self, stage: str, elements: int, seconds: float, elapsed: float) -> float:
        """Return the seconds of a lost bundle that need not be done again: of the real bundles that it stands for."""
        if self._speed == 1.0 or not seconds:
            return 0.0
        rows = elements * self._workload.rows / self.elements[stage]
        real = seconds * min(1.0, self._models[stage].rows_per_bundle / rows)
        return max(0.0, elapsed - real * self._chance.random())

    def _bootstrapped(self, model: StageModel) -> tuple[list[float], float, float]:
        """Resample the measured bundles, so that seeds also differ by what few measured bundles can't tell."""
        sample = self._chance.choices(model.spread, model.weights, k=len(model.spread))
        return sample, statistics.fmean(sample), statistics.pstdev(sample)

    def _drawn(self, model: StageModel, rows: float) -> float:
        """Return how long a bundle takes, relative to the mean: the mean of as many measured ones as it stands for."""
        sample, mean, deviation = self._spread[model.id]
        draws = max(1, round(rows / model.rows_per_bundle))
        if len(sample) == 1:
            return mean
        if draws <= _SUMMED_DRAWS:
            return statistics.fmean(self._chance.choices(sample, k=draws))
        return max(0.1 * mean, self._chance.gauss(mean, deviation / math.sqrt(draws)))


class _Simulation:
    """One simulated run: the loop's parts, what happens to workers from outside, and what is noted of it.

    The loop's time passes as fast as that of the run if the run is short. In a long run, or one with many workers, one
    second of the loop stands for many: each of its bundles stands for as many real ones, and the simulation is quick.
    """

    def __init__(self, workload: Workload, seed: int) -> None:
        self._workload = workload
        self._chance = random.Random(seed)
        self._estimated = _estimate(workload)
        self._speed = _speed(workload, self._estimated)
        is_exact = self._speed == 1.0
        self._time = time = VirtualTime() if is_exact else VirtualTime(_TICK_S)
        self._costs = _MeasuredCosts(workload, self._speed, self._chance, time)
        self._crew = CountedCrew(time, self._costs, 0.0 if is_exact else _CATCH_UP_S)
        self._crew.on_up = self._may_lose
        stages = [self._counted(model) for model in workload.stages]
        pools = [
            CountedPool(
                model.name,
                min(_MOST_WORKERS, _first_workers(model)),
                min(_MOST_WORKERS, model.most_workers),
                is_ahead=not is_exact or bool(model.device),
            )
            for model in workload.pools
        ]
        self._parts = counted_parts(stages, pools, time, self._crew)
        self._pools = {pool.plan.name: pool for pool in self._parts.pools}
        labels = {model.id: model.label for model in workload.stages}
        self._statuses = Statuses(self._parts.stages, self._parts.buffers, time.clock, lambda stage: labels[stage.id])
        self._states = {model.id: defaultdict[str, float](float) for model in workload.stages}
        self._most = {model.name: 0 for model in workload.pools}
        self._totals = {name: _Total(self._crew, name) for name in self._pools}
        self._growing: set[str] = set()  # pools whose workers of the loop will stand for more, once these have started
        self._busy_at_look = dict.fromkeys(self._pools, 0.0)
        self._busy_at_point = dict.fromkeys(self._pools, 0.0)
        self._lost = 0
        self._points: list[Point] = []
        self._every = 0.0  # of the run's seconds, between two points

    def run(self) -> Outcome:
        """Run to the end."""
        self._every = self._estimated / _POINTS
        self._later(self._every, self._next_point)
        self._later(_LONGEST_S, self._give_up)
        if any(model.autoscale is not None for model in self._workload.pools):
            self._later(LOOK_EVERY_S, self._look_at_pools)
        for seconds in self._workload.lost_at:
            self._later(seconds, self._lose_first)
        listener: Any = _Listener(self._note_end)
        with _quiet():
            Scheduler(self._parts, listener).run()
        return self._outcome()

    @property
    def _now(self) -> float:
        """The seconds since the run began."""
        return self._time.now * self._speed

    def _later(self, seconds: float, happen: Callable[[], None]) -> None:
        self._time.at(seconds / self._speed, happen)

    def _counted(self, model: StageModel) -> CountedStage:
        elements = self._costs.elements[model.id]
        queue = model.queue_rows / self._workload.rows * elements
        if self._speed > 1.0:
            work = model.seconds_per_row * self._workload.rows / self._speed
            workers = next(pool.most_workers for pool in self._workload.pools if pool.name == model.pool)
            seconds = min(_QUEUE_S, _QUEUE_PART * self._estimated / self._speed)
            queue = max(queue, elements * min(1.0, seconds * workers / work)) if work else queue
        return CountedStage(model.id, model.label, model.pool, elements, model.reads_from, model.waits_for, queue)

    # Workers

    def _may_lose(self, worker: CountedWorker) -> None:
        """Draw when a worker that has come up will be preempted."""
        rate = self._workload.preempted_per_hour
        if rate > 0:
            seconds = 3600 * self._chance.expovariate(rate)
            self._later(seconds, lambda: self._lose(worker, LOST_WITH_NODE))

    def _lose_first(self) -> None:
        order = list(self._pools)
        up = [worker for worker in self._crew.workers if worker.is_up]
        if up:
            self._lose(min(up, key=lambda worker: order.index(worker.pool)), _KILLED)

    def _lose(self, worker: CountedWorker, code: int) -> None:
        """Lose a worker: the loop retries what it ran, and starts another one."""
        if worker.is_gone:
            return
        self._lost += round(self._costs.sizes[worker.pool])
        if self._lost > _MOST_LOST:
            raise OptionError(
                f"the simulated run loses more than {_MOST_LOST:,} workers, and does little work between",
                fix="lower the rate of --preempt",
            )
        worker.die(code)

    def _give_up(self) -> None:
        raise OptionError(
            "the simulated run takes more than 10 years, which no forecast can tell",
            fix="simulate fewer rows, more workers, or workers that start faster",
        )

    def _look_at_pools(self) -> None:
        for model in self._workload.pools:
            if model.autoscale is not None:
                self._look(model, self._pools[model.name])
        self._later(LOOK_EVERY_S, self._look_at_pools)

    def _look(self, model: PoolModel, pool: PoolRun) -> None:
        """Double a pool whose workers were all busy while more work waits; end workers that had nothing to do."""
        assert model.autoscale is not None
        busy = self._busy_seconds(model.name)
        used = (busy - self._busy_at_look[model.name]) / LOOK_EVERY_S
        self._busy_at_look[model.name] = busy
        if pool.starting() or model.name in self._growing:
            return
        target = up = self._workers(model.name)
        seconds = {each.id: each.seconds_per_row for each in self._workload.stages}
        waiting = sum(
            self._rows(run.id, run.queued) * seconds[run.id] for run in self._parts.stages if run.pool is pool
        )
        is_full = any(
            self._parts.buffers[read.buffer_id].full_reader()
            for run in self._parts.stages
            if run.pool is pool
            for read in run.plan.reads
        )
        if used > 0.9 * up and (waiting > LOOK_EVERY_S * up or is_full):
            target = min(model.autoscale.most, 2 * up)
        elif used < 0.5 * up:
            target = max(model.autoscale.least, math.ceil(1.2 * used), 1)
        give_workers(pool, min(_MOST_WORKERS, target))
        for index, worker in list(pool.workers.items()):
            if index >= target and isinstance(worker.process, CountedWorker) and worker.process.is_idle:
                worker.process.die(LOST_WITH_NODE)
        if _size(target) > self._costs.sizes[model.name]:
            self._growing.add(model.name)
            self._later(model.startup_seconds + model.load_seconds, lambda: self._resize(model.name, target))
        else:
            self._resize(model.name, target)

    def _resize(self, pool: str, workers: int) -> None:
        """Let the workers of the loop stand for so many."""
        before, size = self._costs.sizes[pool], _size(workers)
        if size != before:
            self._totals[pool].add(before)
            self._crew.quicken(pool, size / before)
            self._costs.sizes[pool] = size
        self._growing.discard(pool)

    def _workers(self, pool: str) -> int:
        """Return how many workers a pool has that are up or start."""
        return round(len(self._pools[pool].workers) * self._costs.sizes[pool])

    # Looking at it

    def _rows(self, stage: str, elements: float) -> float:
        return elements * self._workload.rows / self._costs.elements[stage]

    def _next_point(self) -> None:
        self._note_point()
        if len(self._points) >= 4 * _POINTS:
            self._thin_points()  # the run takes longer than was estimated
        self._later(self._every, self._next_point)

    def _note_point(self) -> None:
        running: defaultdict[str, int] = defaultdict(int)
        for pool in self._parts.pools:
            for worker in pool.workers.values():
                for bundle in worker.bundles.values():
                    running[bundle.stage.id] += 1
        for stage in self._parts.stages:
            status, by = self._statuses.status(stage, running[stage.id])
            if status == "busy" and stage.queued and not stage.pool.free_slots():
                status, by = "needs worker", (stage.pool.plan.name,)
            said = {"held back": "held back by", "needs worker": "needs worker:"}.get(status, "starved by")
            self._states[stage.id][f"{said} {by[0]}" if by else status] += self._every
        busy: dict[str, float] = {}
        elapsed = self._now - (self._points[-1].seconds if self._points else 0.0)
        for name in self._pools:
            so_far = self._busy_seconds(name)
            busy[name] = (so_far - self._busy_at_point[name]) / max(elapsed, 1e-9)
            self._busy_at_point[name] = so_far
        work = {model.id: model.seconds_per_row for model in self._workload.stages}
        done = sum(self._rows(stage.id, stage.elements_done) * work[stage.id] for stage in self._parts.stages)
        total = self._workload.rows * sum(work.values())
        workers = {name: self._workers(name) for name in self._pools}
        self._most = {name: max(most, workers[name]) for name, most in self._most.items()}
        self._points.append(Point(self._now, workers, busy, done / total if total else 1.0))

    def _note_end(self) -> None:
        if not self._points or self._points[-1].seconds < self._now:
            self._note_point()

    def _thin_points(self) -> None:
        """Keep every second point, with what was busy between it and the last; later points are twice as far apart."""
        pairs = zip(self._points[::2], self._points[1::2], strict=False)
        self._points = [
            replace(after, busy={name: (before.busy[name] + busy) / 2 for name, busy in after.busy.items()})
            for before, after in pairs
        ]
        self._every *= 2

    def _busy_seconds(self, pool: str) -> float:
        total = self._totals[pool]
        total.add(self._costs.sizes[pool])
        return self._speed * total.busy

    def _outcome(self) -> Outcome:
        fixed = self._workload.fixed_seconds
        return Outcome(
            self._now + fixed,
            {name: self._speed * self._totals[name].paid + fixed * n for name, n in self._points[-1].workers.items()},
            {name: self._speed * self._totals[name].busy for name in self._pools},
            self._most,
            self._lost,
            {name: _shares(states) for name, states in self._states.items()},
            tuple(self._points),
        )


class _Total:
    """The seconds of a pool's workers and of their bundles, with what each worker of the loop stands for."""

    def __init__(self, crew: CountedCrew, pool: str) -> None:
        self._crew = crew
        self._pool = pool
        self._counted = 0.0, 0.0
        self.paid = 0.0
        self.busy = 0.0

    def add(self, size: float) -> None:
        """Count what has passed since the last call, in which each worker stood for ``size``."""
        paid, busy = self._crew.paid_seconds(self._pool), self._crew.busy_seconds(self._pool)
        self.paid += size * (paid - self._counted[0])
        self.busy += size * (busy - self._counted[1])
        self._counted = paid, busy


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Keep the loop from logging the loss of simulated workers."""
    logger = logging.getLogger(Scheduler.__module__)
    logger.addFilter(_nothing)
    try:
        yield
    finally:
        logger.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return False


def _estimate(workload: Workload) -> float:
    """Return about how long the run takes: the work of the pool that has the most for each worker."""
    pools = {pool.name: pool for pool in workload.pools}
    work = dict.fromkeys(pools, 0.0)
    for stage in workload.stages:
        work[stage.pool] += stage.seconds_per_row * workload.rows
    each = (seconds / max(1, pools[name].most_workers) for name, seconds in work.items())
    start = max((pool.startup_seconds + pool.load_seconds for pool in workload.pools), default=0)
    return max(1e-3, max(each, default=0.0) + start)


def _speed(workload: Workload, estimated: float) -> float:
    """Return how many seconds of the run pass in one second of the loop's time."""
    sizes = {pool.name: _size(pool.most_workers) for pool in workload.pools}
    busy = workload.rows * sum(stage.seconds_per_row / sizes[stage.pool] for stage in workload.stages) / estimated
    seconds = min(_LONGEST_RUN_S, max(_SHORTEST_S, _WORKER_SECONDS / max(1.0, busy)))
    return max(1.0, estimated / seconds)


def _elements(model: StageModel, workload: Workload, speed: float) -> int:
    """Return how many elements a stage has, each of which has as much work as the loop can tell."""
    work = workload.rows * model.seconds_per_row / speed
    return max(1, int(min(workload.rows, MOST_ELEMENTS, max(1000.0, work / _LEAST_ELEMENT_S))))


def _size(workers: int) -> float:
    """Return how many of so many workers one worker of the loop stands for."""
    return max(1.0, workers / _MOST_WORKERS)


def _first_workers(model: PoolModel) -> int:
    return model.workers if model.autoscale is None else max(1, model.autoscale.least)


def _shares(states: Mapping[str, float]) -> dict[str, float]:
    total = sum(seconds for name, seconds in states.items() if name != "done")
    longest_first = sorted(states.items(), key=lambda each: -each[1])
    return {name: seconds / total for name, seconds in longest_first if name != "done"}
