"""Runs a plan in simulated time, from its first start over all crashes to its end."""

from __future__ import annotations

import itertools
import os
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from luminosity.engine.assemble import Descriptors, assemble
from luminosity.engine.data.state import StateStore
from luminosity.engine.durable.names import Names
from luminosity.engine.durable.restoring import restore_metrics
from luminosity.engine.durable.resume import Checkpoint
from luminosity.engine.durable.store import CheckpointFolder
from luminosity.engine.fnapi.connection import WorkerServer
from luminosity.engine.folders import RunFolders
from luminosity.engine.loop.metrics import RunMetrics
from luminosity.engine.loop.scheduler import Scheduler
from luminosity.engine.options import EngineConfig
from luminosity.engine.prepare import Prepared
from luminosity.engine.simulated.beam_worker import BeamBundles, as_in_workers
from luminosity.engine.simulated.chaos import Chaos, DriverKilled
from luminosity.engine.simulated.crew import SimulatedCrew
from luminosity.engine.simulated.disasters import Weather
from luminosity.engine.simulated.disk import SimulatedDisk, no_space
from luminosity.engine.simulated.invariants import Broken, Invariants
from luminosity.engine.simulated.simulation import Simulation
from luminosity.engine.workers.launcher import Launcher
from luminosity.errors import CheckpointFailed, SpillFailed

__all__ = ["Outcome", "SimulatedPlan", "SimulatedRun"]

_URL = "unix:simulated"  # nothing listens there
_MOST_STARTS = 12
_LOOKS = 20  # rounds of the loop without a message, between two checks
_ROUNDS_PER_MESSAGE = 50  # rounds without a message that count as one, so that disasters go on
_MOST_MESSAGES = 200_000  # of one run: small ones have some hundreds


class _Folders(RunFolders):
    """The folders of a run below a given one: nobody else looks for them, and the owner removes that one."""

    def __init__(self, root: Path, blocks: str | None) -> None:
        self._root = root
        super().__init__(None, blocks)

    def _make_all(self, spill_root: str, disk_root: str) -> None:
        os.makedirs(self._root)
        root = str(self._root)
        self.all.append(root)
        self.memory = self.spill = self.sockets = root
        self.main_classes, self.load_ahead = f"{root}/main-classes", f"{root}/load-ahead"
        self.quota, self.url = f"{root}/quota", _URL


class _Listener:
    """Hears of everything, and does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


@dataclass
class SimulatedPlan:
    """A planned pipeline, and what its simulated workers keep from one run to the next."""

    prepared: Prepared

    def __post_init__(self) -> None:
        graph = self.prepared.graph
        self.beam = BeamBundles({stage.id: graph.descriptor(stage, _URL) for stage in (*graph.stages, *graph.groupers)})

    def with_config(self, config: EngineConfig, workers: int) -> Prepared:
        """Return the plan for a run: with this configuration, and so many workers in each pool."""
        pools = {id(a.pool): replace(a.pool, workers=workers, borrowed=0) for a in self.prepared.assignments.values()}
        assignments = {key: replace(a, pool=pools[id(a.pool)]) for key, a in self.prepared.assignments.items()}
        return replace(self.prepared, config=config, assignments=assignments)


@dataclass
class Outcome:
    """What came of a simulated run."""

    metrics: RunMetrics
    trace: str
    starts: int
    messages: int
    seconds: float  # simulated
    worker_s: float  # simulated, of all workers together
    disasters: Counter[str]


class SimulatedRun:
    """One run of a plan in simulated time."""

    def __init__(self, plan: SimulatedPlan, seed: int, workers: int, weather: Weather, config: EngineConfig) -> None:
        self.simulation = Simulation(seed, self._before_message, weather.loop_s)
        self.simulation.stall_part, self.simulation.stall_s = weather.stall_part, weather.stall_s
        self.chaos = Chaos(list(weather.disasters))
        self._plan = plan
        self._weather = weather
        self._prepared = plan.with_config(config, workers)
        self._disk = SimulatedDisk(self._before_sync, self._before_spill)
        self._crew: SimulatedCrew | None = None
        self._scheduler: Scheduler | None = None
        self._invariants: Invariants | None = None
        self._worker_s = 0.0
        self._counted_at = 0.0
        self._rounds = 0
        self._checkpoint = self._crashed = Path()

    def run(self, folder: Path) -> Outcome:
        """Run to the end, with files in ``folder``, which the caller removes. Raises what ends the run for good."""
        simulation = self.simulation
        is_durable = self._prepared.config.checkpoint_dir is not None
        self._checkpoint = folder / "checkpoint-0"
        with as_in_workers(lambda: simulation.clock.wall + simulation.now), self._disk.in_place():
            for number in itertools.count(1):
                if number > _MOST_STARTS:
                    self.chaos.end()
                self.chaos.is_over = False
                try:
                    metrics, has_finished = self._start(folder / f"run-{number}", self._checkpoint)
                    if has_finished:
                        return self._outcome(metrics, number)
                except DriverKilled:
                    self._checkpoint = self._crashed
                except (SpillFailed, CheckpointFailed):
                    if not is_durable or not {"fail disk", "fill disk"} & self.chaos.happened.keys():
                        raise
                    simulation.now = max(simulation.now, self.chaos.disk_fails_until, self.chaos.disk_full_until)
                finally:
                    simulation.close()
                    self._crew = self._scheduler = self._invariants = None
                simulation.trace.add(f"{simulation.now:.6f} start {number} has ended")
                shutil.rmtree(folder / f"run-{number}", ignore_errors=True)
        raise AssertionError

    def _start(self, root: Path, checkpoint_path: Path) -> tuple[RunMetrics, bool]:
        """Start, or start again. Returns the metrics, and whether the pipeline has finished."""
        prepared, metrics = self._prepared, RunMetrics()
        checkpoint = self._open(checkpoint_path) if prepared.config.checkpoint_dir is not None else None
        folders, has_failed = None, False
        try:
            if checkpoint is not None and checkpoint.is_finished:
                restore_metrics(checkpoint.folder, Names(prepared.graph), prepared.graph.stages, metrics)
                return metrics, True
            if checkpoint is not None:
                checkpoint.fit(lambda _: prepared.graph, prepared.config)
                folders = _Folders(root, checkpoint.new_files)
                checkpoint.begin(prepared.graph, prepared.config, "simulated")
            else:
                folders = _Folders(root, None)
            parts = assemble(prepared, folders, metrics, {}, checkpoint, self.simulation.world, self._make_workers)
            listener: Any = _Listener()
            self._scheduler = Scheduler(parts, listener)
            self._invariants = Invariants(parts, self.simulation)
            has_finished = self._scheduler.run() == "finished"
            if has_finished:
                self._invariants.check_end()
            return metrics, has_finished
        except Exception:
            has_failed = True
            raise
        finally:
            if self._crew is not None:
                self._crew.stop()
            if checkpoint is not None:
                checkpoint.close(has_failed=has_failed)
            if folders is not None:
                folders.remove()

    def _open(self, path: Path) -> Checkpoint:
        folder = CheckpointFolder(str(path), clock=self.simulation.clock)
        try:
            checkpoint = Checkpoint(folder, folder.meta())
            if checkpoint.is_resumed:
                folder.check_files()
        except BaseException:
            folder.close()
            raise
        return checkpoint

    def _make_workers(self, state: StateStore, descriptors: Descriptors) -> tuple[WorkerServer, Launcher]:
        crew = self._crew = SimulatedCrew(self.simulation, self._weather, state, self._plan.beam)
        return crew, crew

    def _before_message(self, is_new: bool) -> None:
        """Check everything, then let happen what is due. The loop is about to wait for its next message."""
        if self._crew is None or self._scheduler is None or self._invariants is None or self.chaos.is_over:
            return
        now = self.simulation.now
        self._worker_s += len(self._crew.workers) * (now - self._counted_at)
        self._counted_at = now
        if is_new or self._rounds % _LOOKS == 0:
            self._invariants.check()
        self._rounds += 1
        if not is_new and self._rounds % _ROUNDS_PER_MESSAGE:
            return  # the loop has only looked at its clock
        if self.chaos.messages > _MOST_MESSAGES:
            raise Broken(f"the run does not end: {self._invariants.describe()}")
        try:
            self.chaos.before_message(self.simulation, self._crew, self._scheduler.stop)
        except DriverKilled as killed:
            # The disk as it is now: what the loop still does while it ends would not happen in a process that is gone.
            self._crashed = self._checkpoint.with_name(f"checkpoint-{self.chaos.messages}")
            chance = self.simulation.chance
            self._disk.crash(self._checkpoint, self._crashed, chance, is_power_lost=killed.is_power_lost)
            raise

    def _outcome(self, metrics: RunMetrics, starts: int) -> Outcome:
        simulation, chaos = self.simulation, self.chaos
        simulation.trace.add(f"{simulation.now:.6f} finished")
        return Outcome(
            metrics,
            simulation.trace.digest(),
            starts,
            chaos.messages,
            simulation.now,
            self._worker_s,
            chaos.happened,
        )

    def _before_sync(self) -> None:
        if self.simulation.running is not None and self.chaos.sync_s:
            self.simulation.pause(self.chaos.sync_s)
        if self.simulation.now < self.chaos.disk_fails_until:
            raise no_space()

    def _before_spill(self) -> None:
        if self.simulation.now < self.chaos.disk_full_until:
            raise no_space()
