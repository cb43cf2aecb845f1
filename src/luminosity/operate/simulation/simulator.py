"""A discrete-event simulation of a run: bundles, workers that start, end and are lost, and queues with limits."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from luminosity.errors import OptionError
from luminosity.operate.simulation.workload import PoolModel, StageModel, Workload

__all__ = ["Outcome", "Point", "run"]

LOOK_EVERY_S = 30.0  # how often an autoscaler looks, as Dataflow's does

_BUNDLES_PER_WORKER = 12  # of a stage: few enough to be quick, enough that pools mix their stages
_FEWEST_BUNDLES = 400  # of a stage
_FINEST = 32  # the last bundles are this much smaller, as in a real run: idle workers take work from others
_POINTS = 240  # over the run, for the picture
_SUMMED_DRAWS = 12  # bundles that are drawn one by one; the mean of more is close to a normal distribution
_LONGEST_S = 10 * 365 * 86_400.0  # a simulation that gets here makes no progress
_MOST_LOST = 100_000  # workers: each takes some time to simulate
_TINY = 1e-9  # of all rows: rounding


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


@dataclass(eq=False)
class _Worker:
    pool: _Pool
    started_at: float
    is_up: bool = False
    is_gone: bool = False
    bundle: _Bundle | None = None


@dataclass(eq=False)
class _Pool:
    model: PoolModel
    target: int
    workers: list[_Worker] = field(default_factory=list["_Worker"])
    free: list[_Worker] = field(default_factory=list["_Worker"])
    most: int = 0
    busy_seconds: float = 0.0
    worker_seconds: float = 0.0
    busy_at_look: float = 0.0
    busy_at_point: float = 0.0


@dataclass(eq=False)
class _Stage:
    model: StageModel
    pool: _Pool
    bundle_rows: float = 1.0
    taken: float = 0.0  # rows that bundles have taken
    done: float = 0.0
    again: float = 0.0  # rows of lost bundles
    running: int = 0
    before: list[_Stage] = field(default_factory=list["_Stage"])
    gates: list[_Stage] = field(default_factory=list["_Stage"])
    readers: list[_Stage] = field(default_factory=list["_Stage"])
    states: defaultdict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))  # seconds


@dataclass(eq=False)
class _Bundle:
    stage: _Stage
    rows: float
    started_at: float
    seconds: float


def run(workload: Workload, seed: int = 0) -> Outcome:
    """Simulate a run. The same seed gives the same outcome."""
    return _Simulation(workload, seed).run()


class _Simulation:
    """One simulated run. Many bundles of a real run are simulated as one, so that large runs take seconds."""

    def __init__(self, workload: Workload, seed: int) -> None:
        self._workload = workload
        self._random = np.random.default_rng(seed)
        self._pools = {model.name: _Pool(model, _first_workers(model)) for model in workload.pools}
        self._stages = [_Stage(model, self._pools[model.pool]) for model in workload.stages]
        by_id = {stage.model.id: stage for stage in self._stages}
        for stage in self._stages:
            stage.before = [by_id[name] for name in stage.model.reads_from]
            stage.gates = [by_id[name] for name in stage.model.waits_for]
            for writer in stage.before:
                writer.readers.append(stage)
            most = max(_FEWEST_BUNDLES, _BUNDLES_PER_WORKER * stage.pool.model.most_workers)
            stage.bundle_rows = max(stage.model.rows_per_bundle, workload.rows / most)
        self._latest_first = self._stages[::-1]
        self._enough = workload.rows * (1 - _TINY)  # rows of a stage that is done
        self._spread = {stage.model.id: self._bootstrapped(stage.model) for stage in self._stages}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        """What will happen, the next first: its time, a number that keeps equal times in order, and a function."""
        self._numbers = itertools.count()
        self._now = 0.0
        self._demand = 0.0  # cores that running bundles use
        self._lost = 0
        self._points: list[Point] = []
        self._every = 0.0  # seconds between two points

    def run(self) -> Outcome:
        """Run to the end."""
        for pool in self._pools.values():
            self._start_workers(pool)
        self._every = self._estimate() / _POINTS
        self._push(self._every, self._next_point)
        if any(pool.model.autoscale is not None for pool in self._pools.values()):
            self._push(LOOK_EVERY_S, self._look_at_pools)
        for seconds in self._workload.lost_at:
            self._push(seconds, self._lose)
        self._dispatch()
        while not self._is_done():
            self._now, _, happen = heapq.heappop(self._heap)
            if self._now > _LONGEST_S:
                raise OptionError(
                    "the simulated run takes more than 10 years, which no forecast can tell",
                    fix="simulate fewer rows, more workers, or workers that start faster",
                )
            if self._lost > _MOST_LOST:
                raise OptionError(
                    f"the simulated run loses more than {_MOST_LOST:,} workers, and does little work between",
                    fix="lower the rate of --preempt",
                )
            happen()
            self._dispatch()
        return self._outcome()

    # Workers

    def _start_workers(self, pool: _Pool) -> None:
        started = 0
        while len(pool.workers) < pool.target:
            at = self._now + pool.model.startup_seconds + started * pool.model.start_gap
            worker = _Worker(pool, at)
            pool.workers.append(worker)
            self._push(at + pool.model.load_seconds, partial(self._come_up, worker))
            started += 1
        pool.most = max(pool.most, len(pool.workers))

    def _come_up(self, worker: _Worker) -> None:
        if worker.is_gone:
            return
        worker.is_up = True
        worker.pool.free.append(worker)
        if self._workload.preempted_per_hour > 0:
            hours = float(self._random.exponential(1 / self._workload.preempted_per_hour))
            self._push(self._now + 3600 * hours, partial(self._lose, worker))

    def _end(self, worker: _Worker) -> None:
        worker.is_gone = True
        pool = worker.pool
        pool.workers.remove(worker)
        if worker in pool.free:
            pool.free.remove(worker)
        pool.worker_seconds += max(0.0, self._now - worker.started_at)

    def _lose(self, worker: _Worker | None = None) -> None:
        """Lose a worker: what it ran since its last real bundle is done again, and another worker starts."""
        if worker is None:
            worker = next((each for pool in self._pools.values() for each in pool.workers if each.is_up), None)
        if worker is None or worker.is_gone:
            return
        self._lost += 1
        bundle = worker.bundle
        if bundle is not None:
            elapsed = self._now - bundle.started_at
            # Many real bundles make this one, and only the one that runs is lost.
            real = bundle.seconds * min(1.0, bundle.stage.model.rows_per_bundle / bundle.rows)
            kept = max(0.0, elapsed - min(elapsed, real * float(self._random.random())))
            done = bundle.rows * min(1.0, kept / bundle.seconds) if bundle.seconds else 0.0
            self._leave(worker, elapsed)
            bundle.stage.done += done
            bundle.stage.again += bundle.rows - done
        self._end(worker)
        self._start_workers(worker.pool)

    def _look_at_pools(self) -> None:
        for pool in self._pools.values():
            self._look(pool)
        self._push(self._now + LOOK_EVERY_S, self._look_at_pools)

    def _look(self, pool: _Pool) -> None:
        """Double a pool whose workers were all busy while more work waits; end workers that had nothing to do."""
        limits = pool.model.autoscale
        if limits is None:
            return
        busy = self._busy_seconds(pool)
        used = (busy - pool.busy_at_look) / LOOK_EVERY_S
        pool.busy_at_look = busy
        up = sum(worker.is_up for worker in pool.workers)
        waiting = sum(self._queued(stage) * stage.model.seconds_per_row for stage in self._stages if stage.pool is pool)
        if up < len(pool.workers):
            return  # some still start
        if used > 0.9 * up and waiting > LOOK_EVERY_S * up:
            pool.target = min(limits.most, 2 * up)
        elif used < 0.5 * up:
            pool.target = max(limits.least, math.ceil(1.2 * used), 1)
        for worker in [each for each in pool.free if each.is_up][: max(0, len(pool.workers) - pool.target)]:
            self._end(worker)
        self._start_workers(pool)

    # Bundles

    def _dispatch(self) -> None:
        """Start bundles, last stages first, while there are input and free workers."""
        for stage in self._latest_first:
            while stage.pool.free and not self._is_held_back(stage):
                rows = self._next_rows(stage)
                if rows <= 0:
                    break
                self._start(stage, rows)

    def _next_rows(self, stage: _Stage) -> float:
        ready = self._queued(stage)
        if ready <= _TINY * self._workload.rows:
            return 0.0
        left = self._workload.rows - stage.taken + stage.again
        fair = left / (2 * max(1, len(stage.pool.workers)))
        rows = min(stage.bundle_rows, max(stage.bundle_rows / _FINEST, fair))
        is_all_there = stage.taken - stage.again + ready >= self._enough
        if ready < rows and not is_all_there and stage.running:
            return 0.0  # more comes, and the stage has work: a larger bundle is simulated faster
        return min(rows, ready)

    def _queued(self, stage: _Stage) -> float:
        if any(gate.done < self._enough for gate in stage.gates):
            return 0.0
        arrived = min((writer.done for writer in stage.before), default=self._workload.rows)
        return arrived - stage.taken + stage.again

    def _is_held_back(self, stage: _Stage) -> bool:
        for reader in stage.readers:
            if stage in reader.gates:
                continue  # groups and side inputs spill to disk instead
            # Bundles stand for many real ones here: the queue must hold enough of them to keep the readers busy.
            least = 2 * reader.bundle_rows * len(reader.pool.workers)
            if stage.done - reader.taken + reader.again > max(reader.model.queue_rows, least):
                return True
        return False

    def _start(self, stage: _Stage, rows: float) -> None:
        worker = stage.pool.free.pop()
        again = min(stage.again, rows)
        stage.again -= again
        stage.taken += rows - again
        stage.running += 1
        self._demand += stage.model.cores
        seconds = rows * stage.model.seconds_per_row * self._drawn(stage.model, rows)
        if self._demand > self._workload.cores and stage.model.cores:
            # Only the computing part of a bundle waits for a core.
            computing = min(1.0, stage.model.cores)
            seconds *= 1 + computing * (self._demand / self._workload.cores - 1)
        worker.bundle = _Bundle(stage, rows, self._now, seconds)
        self._push(self._now + seconds, partial(self._finish, worker, worker.bundle))

    def _finish(self, worker: _Worker, bundle: _Bundle) -> None:
        if worker.bundle is not bundle:
            return  # the worker was lost meanwhile
        bundle.stage.done += bundle.rows
        self._leave(worker, bundle.seconds)
        if len(worker.pool.workers) > worker.pool.target:
            self._end(worker)
        else:
            worker.pool.free.append(worker)

    def _leave(self, worker: _Worker, seconds: float) -> None:
        assert worker.bundle is not None
        stage = worker.bundle.stage
        stage.running -= 1
        self._demand -= stage.model.cores
        worker.pool.busy_seconds += seconds
        worker.bundle = None

    def _bootstrapped(self, model: StageModel) -> tuple[np.ndarray, float, float]:
        """Resample the measured bundles, so that seeds also differ by what few measured bundles can't tell."""
        spread, weights = np.asarray(model.spread), np.asarray(model.weights)
        sample = spread[self._random.choice(len(spread), size=len(spread), p=weights / weights.sum())]
        return sample, float(sample.mean()), float(sample.std())

    def _drawn(self, model: StageModel, rows: float) -> float:
        """Return how long a bundle takes, relative to the mean: the mean of as many measured ones as it stands for."""
        sample, mean, deviation = self._spread[model.id]
        draws = max(1, round(rows / model.rows_per_bundle))
        if len(sample) == 1:
            return mean
        if draws <= _SUMMED_DRAWS:
            return float(sample[self._random.integers(len(sample), size=draws)].mean())
        return max(0.1 * mean, float(self._random.normal(mean, deviation / math.sqrt(draws))))

    # Looking at it

    def _is_done(self) -> bool:
        return all(stage.done >= self._enough for stage in self._stages)

    def _estimate(self) -> float:
        """Return about how long the run takes: the work of the pool that has the most for each worker."""
        work = dict.fromkeys(self._pools, 0.0)
        for stage in self._stages:
            work[stage.model.pool] += stage.model.seconds_per_row * self._workload.rows
        each = (seconds / self._pools[name].model.most_workers for name, seconds in work.items())
        start = max((pool.model.startup_seconds + pool.model.load_seconds for pool in self._pools.values()), default=0)
        return max(1e-3, max(each, default=0.0) + start)

    def _next_point(self) -> None:
        self._note_point()
        if len(self._points) >= 4 * _POINTS:
            self._thin_points()  # the run takes longer than was estimated
        self._push(self._now + self._every, self._next_point)

    def _note_point(self) -> None:
        for stage in self._stages:
            stage.states[self._state(stage)] += self._every
        busy: dict[str, float] = {}
        elapsed = self._now - (self._points[-1].seconds if self._points else 0.0)
        for name, pool in self._pools.items():
            so_far = self._busy_seconds(pool)
            busy[name] = (so_far - pool.busy_at_point) / max(elapsed, 1e-9)
            pool.busy_at_point = so_far
        done = sum(stage.done * stage.model.seconds_per_row for stage in self._stages)
        total = sum(self._workload.rows * stage.model.seconds_per_row for stage in self._stages)
        workers = {name: len(pool.workers) for name, pool in self._pools.items()}
        self._points.append(Point(self._now, workers, busy, done / total if total else 1.0))

    def _thin_points(self) -> None:
        """Keep every second point, with what was busy between it and the last; later points are twice as far apart."""
        pairs = zip(self._points[::2], self._points[1::2], strict=False)
        self._points = [
            replace(after, busy={name: (before.busy[name] + busy) / 2 for name, busy in after.busy.items()})
            for before, after in pairs
        ]
        self._every *= 2

    def _busy_seconds(self, pool: _Pool) -> float:
        running = (worker.bundle for worker in pool.workers if worker.bundle is not None)
        return pool.busy_seconds + sum(self._now - bundle.started_at for bundle in running)

    def _state(self, stage: _Stage) -> str:
        if stage.done >= self._enough:
            return "done"
        has_input = self._queued(stage) > _TINY * self._workload.rows
        if has_input and self._is_held_back(stage):
            full = (r for r in stage.readers if stage.done - r.taken + r.again > r.model.queue_rows)
            return f"held back by {next((r.model.label for r in full), stage.readers[0].model.label)}"
        if has_input and not stage.pool.free:
            return f"needs worker: {stage.pool.model.name}"
        if stage.running or has_input:
            return "busy"
        behind = [w for w in (*stage.gates, *stage.before) if w.done < self._enough]
        return f"starved by {behind[0].model.label}" if behind else "busy"

    def _outcome(self) -> Outcome:
        if not self._points or self._points[-1].seconds < self._now:
            self._note_point()
        for pool in self._pools.values():
            pool.worker_seconds += self._workload.fixed_seconds * len(pool.workers)  # they stay until the run ends
            for worker in list(pool.workers):
                self._end(worker)
        return Outcome(
            self._now + self._workload.fixed_seconds,
            {name: pool.worker_seconds for name, pool in self._pools.items()},
            {name: pool.busy_seconds for name, pool in self._pools.items()},
            {name: pool.most for name, pool in self._pools.items()},
            self._lost,
            {stage.model.id: _shares(stage.states) for stage in self._stages},
            tuple(self._points),
        )

    def _push(self, at: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (at, next(self._numbers), happen))


def _first_workers(model: PoolModel) -> int:
    return model.workers if model.autoscale is None else max(1, model.autoscale.least)


def _shares(states: Mapping[str, float]) -> dict[str, float]:
    total = sum(seconds for name, seconds in states.items() if name != "done")
    longest_first = sorted(states.items(), key=lambda each: -each[1])
    return {name: seconds / total for name, seconds in longest_first if name != "done"}
