"""The server and the launcher of simulated workers."""

from __future__ import annotations

from luminosity.engine.data.state import StateStore
from luminosity.engine.fnapi.connection import Callbacks
from luminosity.engine.simulated.beam_worker import BeamBundles, DirectState
from luminosity.engine.simulated.disasters import Weather
from luminosity.engine.simulated.simulation import Simulation
from luminosity.engine.simulated.worker import SimulatedWorker
from luminosity.engine.spill.quota import WriterQuota
from luminosity.engine.workers.launcher import OnExit, Process
from luminosity.engine.workers.request import WorkerRequest
from luminosity.engine.workers.sdk.channel import BlockWriter

__all__ = ["SimulatedCrew"]


class SimulatedCrew:
    """Replaces the Fn API server and the launcher of worker processes."""

    def __init__(self, simulation: Simulation, weather: Weather, state: StateStore, beam: BeamBundles) -> None:
        self._simulation = simulation
        self._weather = weather
        self._state = state
        self._beam = beam
        self._connections: dict[str, SimulatedWorker] = {}
        self.workers: list[SimulatedWorker] = []  # all that have started and not died
        self.deadly_starts = 0  # how many of the next workers die before they are ready
        self.busy_s = 0.0

    def connect(self, worker_id: str, callbacks: Callbacks) -> SimulatedWorker:
        """Expect a worker with this id."""
        worker = SimulatedWorker(worker_id, self._simulation, self._weather, callbacks, lambda: self._beam)
        self._connections[worker_id] = worker
        return worker

    def disconnect(self, worker_id: str) -> None:
        """Close the connection of a worker that has exited."""
        worker = self._connections.pop(worker_id)
        worker.close()
        self.workers.remove(worker)

    def start(self, request: WorkerRequest, on_exit: OnExit) -> Process:
        """Start the worker of a connection that was made before."""
        worker = self._connections[request.worker_id]
        self.workers.append(worker)
        quota = WriterQuota(request.quota, request.writer)
        writer = BlockWriter(request.memory_folder, request.spill_folder, quota, request.worker_id)
        worker.start(on_exit, writer, DirectState(self._state.handle, lambda: self._simulation.now))
        if self.deadly_starts:
            self.deadly_starts -= 1
            worker.die(1)
        return worker

    def stop(self) -> None:
        """End what is left, without telling the loop, which has ended."""
        for worker in self._connections.values():
            worker.close()
            worker.kill()
