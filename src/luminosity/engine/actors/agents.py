"""One agent for each node that a run uses: it owns the run's folder there and holds second copies of blocks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from luminosity.engine.actors.node_actor import NodeAgent
from luminosity.engine.actors.ray_store import RayStore
from luminosity.engine.cluster.packages import INSTALL_TIMEOUT_S
from luminosity.errors import BlockLost, WorkerStartFailed

__all__ = ["Agent", "Agents"]

_LOGGER = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0  # for an agent to start, on a busy node
_CLOSE_TIMEOUT_S = 5.0  # for agents to remove their folders; then their cleaners do it


@dataclass(frozen=True)
class Agent:
    """The agent of one node."""

    node_id: str
    actor: Any
    folder: dict[str, str]  # the paths of the run's folder on that node, and of packages that were installed in it

    def copy(self, reference: Any) -> tuple[Any, Any]:
        """Return the references to a copy that this node will hold, and to its size."""
        copy, size = self.actor.copy.options(num_returns=2).remote(reference)
        return copy, size


class Agents:
    """Starts the agents of a run as its workers get places. Any thread may use it."""

    def __init__(self, run_id: str, files: Mapping[str, bytes], on_lost: Callable[[str], None]) -> None:
        """``on_lost`` is called with the node's id, on a thread of Ray's, when an agent has ended by itself."""
        self._run_id = run_id
        self._files = dict(files)
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._agents: dict[str, Future[Agent]] = {}
        self._is_closed = False

    def at(self, node_id: str) -> Agent:
        """Return the agent of a node. Waits while it starts, and installs packages.

        Raises :class:`WorkerStartFailed` if these can't be installed, and :class:`BlockLost` if the node is lost.
        """
        with self._lock:
            future = self._agents.get(node_id)
            is_first = future is None
            if future is None:
                future = self._agents[node_id] = Future()
        if is_first:
            try:
                agent = self._start(node_id)
            except BaseException as error:
                with self._lock:
                    self._agents.pop(node_id, None)
                future.set_exception(error)
            else:
                future.set_result(agent)
                agent.actor.stay.remote().future().add_done_callback(lambda _: self._ended(agent))
        try:
            # As long as the thread that starts it waits, and a moment more.
            return future.result(_START_TIMEOUT_S + INSTALL_TIMEOUT_S + 1.0)
        except TimeoutError as error:
            raise BlockLost(f"the agent of node {node_id[:8]} has not started in time") from error

    def _start(self, node_id: str) -> Agent:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        made: Any = ray.remote(NodeAgent)
        actor = made.options(
            num_cpus=0,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=16,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        ).remote(self._run_id, self._files)
        store = RayStore()
        try:
            folder = store.get(actor.folder.remote(), _START_TIMEOUT_S, lambda: self._is_closed)
            folder["packages"] = store.get(actor.install.remote(), INSTALL_TIMEOUT_S, lambda: self._is_closed)
        except BlockLost as error:
            ray.kill(actor, no_restart=True)
            if isinstance(cause := getattr(error.__cause__, "cause", None), WorkerStartFailed):
                raise cause from error
            raise BlockLost(f"the agent of node {node_id[:8]} can't start: {error.message}") from error
        return Agent(node_id, actor, folder)

    def _ended(self, agent: Agent) -> None:
        with self._lock:
            future = self._agents.get(agent.node_id)
            if self._is_closed or future is None or not future.done() or future.result() is not agent:
                return  # it was closed or given up
            del self._agents[agent.node_id]
        self._on_lost(agent.node_id)

    def give_up(self, node_id: str) -> None:
        """Forget a node that does not answer, and end its agent when it does again."""
        import ray

        with self._lock:
            future = self._agents.pop(node_id, None)
        if future is not None and future.done() and future.exception() is None:
            ray.kill(future.result().actor, no_restart=True)

    def all(self) -> list[Agent]:
        """Return the agents that have started."""
        with self._lock:
            futures = list(self._agents.values())
        return [each.result() for each in futures if each.done() and each.exception() is None]

    def close(self) -> None:
        """Remove the folders and end the agents."""
        import ray

        with self._lock:
            self._is_closed = True
        agents = self.all()
        closing = [agent.actor.close.remote() for agent in agents]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_TIMEOUT_S)
        for agent in agents:
            ray.kill(agent.actor, no_restart=True)
