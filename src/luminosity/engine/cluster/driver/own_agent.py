"""The agent of the driver's own node: an object in the driver's process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from luminosity.engine.cluster.agent.agent import NodeAgent
from luminosity.engine.cluster.agent.forked_workers import Exit
from luminosity.engine.cluster.agent.node_load import NodeSample
from luminosity.engine.cluster.agent.ray_store import RayStore
from luminosity.engine.cluster.worker.node_worker import NodeWorker
from luminosity.engine.workers.request import WorkerRequest
from luminosity.errors import BlockLost

__all__ = ["OwnAgent"]

_END_S = 5.0  # for the thread to end


class OwnAgent:
    """Calls the agent, and passes on which workers have ended. Any thread may use it."""

    def __init__(self, agent: NodeAgent, node_id: str, on_exits: Callable[[list[Exit]], None]) -> None:
        self.node_id = node_id
        self._agent = agent
        self._on_exits = on_exits
        self._store = RayStore()
        self._is_closed = False
        try:
            agent.install()
        except BaseException:
            agent.close()
            raise
        self._thread = threading.Thread(target=self._listen, name="luminosity-exits", daemon=True)

    def listen(self) -> None:
        """Pass on which workers have ended, from now on."""
        self._thread.start()

    def _listen(self) -> None:
        while not self._is_closed:
            if exits := self._agent.exits():
                self._on_exits(exits)

    def start(self, request: WorkerRequest, worker: NodeWorker) -> None:
        """Start a worker."""
        self._agent.start(request, worker)

    def kill(self, worker_id: str) -> None:
        """Kill a worker."""
        self._agent.kill(worker_id)

    def forget(self, worker_id: str) -> None:
        """Drop the blocks of a worker."""
        self._agent.forget(worker_id)

    def take(self, worker_id: str, number: int) -> tuple[Any, Any]:
        """Store a block of a worker; return the references to it and to its size. Raises :class:`BlockLost`."""
        try:
            block, size = self._agent.take(worker_id, number)
        except KeyError as error:  # what an actor raises comes as BlockLost already
            raise BlockLost(f"worker {worker_id} was forgotten, and its block {number} with it") from error
        return self._store.put(block), self._store.put(size)

    def feed(self, worker_id: str, instruction_id: str, objects: dict[str, Any]) -> None:
        """Name the objects that a bundle reads."""
        self._agent.feed(worker_id, instruction_id, objects)

    def sample(self) -> NodeSample:
        """Return the load of the node since the last call."""
        return self._agent.sample()

    def close(self) -> list[str]:
        """End the workers and remove the folder. Returns the files that steps have written there."""
        if self._is_closed:
            return []
        self._is_closed = True
        written = self._agent.close()
        if self._thread.is_alive():
            self._thread.join(_END_S)
        return written

    def end(self) -> None:
        """Do nothing more: it ends with :meth:`close`."""
