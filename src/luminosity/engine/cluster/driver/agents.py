"""One agent for each node that a run uses, as the driver sees them: see ``agent/agent.py``.

On its own node, the driver is the agent itself: its fork server has most likely imported Beam already, so that the
first workers start at once.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from luminosity._shared.text import list_some
from luminosity.engine.cluster.agent.agent import NodeAgent, RunOnNodes
from luminosity.engine.cluster.agent.block_desk import RayStore
from luminosity.engine.cluster.agent.forked_workers import Exit
from luminosity.engine.cluster.packages import INSTALL_TIMEOUT_S
from luminosity.errors import BlockLost, WorkerStartFailed

__all__ = ["Agent", "Agents", "OwnAgent", "RemoteAgent"]

_LOGGER = logging.getLogger(__name__)

_END_S = 5.0  # for the thread to end
_SHOWN = 3  # files in a message
_START_TIMEOUT_S = 60.0  # for an agent to start, on a busy node
_CONCURRENT_CALLS = 32  # of an agent: one waits for exits, the others move blocks
_CLOSE_TIMEOUT_S = 5.0  # for agents to remove their folders; then their cleaners do it


class RemoteAgent:
    """The agent of another node, an actor, whose methods are called without waiting. Any thread may use it."""

    def __init__(
        self,
        node_id: str,
        actor: Any,
        on_exits: Callable[[list[Exit]], None],
        on_lost: Callable[[RemoteAgent], None],
    ) -> None:
        """``on_exits`` gets workers that have ended. ``on_lost`` is called when the actor has ended by itself."""
        self.node_id = node_id
        self.actor = actor
        self.start, self.kill = actor.start.remote, actor.kill.remote
        self.forget, self.feed = actor.forget.remote, actor.feed.remote
        self._on_exits = on_exits
        self._on_lost = on_lost
        self._is_closed = False

    def listen(self) -> None:
        """Ask for workers that have ended, again and again."""
        self.actor.exits.remote().future().add_done_callback(self._heard)

    def _heard(self, answer: Future[list[Exit]]) -> None:
        if self._is_closed:
            return
        if answer.exception() is not None:
            self._on_lost(self)
            return
        self.listen()
        if exits := answer.result():
            self._on_exits(exits)

    def take(self, worker_id: str, number: int) -> tuple[Any, Any]:
        """Return the references to a block of a worker, which this process owns, and to its size."""
        block, size = self.actor.take.options(num_returns=2).remote(worker_id, number)
        return block, size

    def copy(self, reference: Any) -> tuple[Any, Any]:
        """Return the references to a copy that this node will hold, and to its size."""
        copy, size = self.actor.copy.options(num_returns=2).remote(reference)
        return copy, size

    def close(self) -> Any:
        """Let it end its workers and remove its folder. Returns a reference to its answer."""
        self._is_closed = True
        return self.actor.close.remote()

    def end(self) -> None:
        """End it, also if it does not answer."""
        import ray

        self._is_closed = True
        ray.kill(self.actor, no_restart=True)


class OwnAgent:
    """The agent of the driver's own node, an object of this process. Any thread may use it."""

    def __init__(self, agent: NodeAgent, node_id: str, on_exits: Callable[[list[Exit]], None]) -> None:
        self.node_id = node_id
        self.start, self.kill, self.forget = agent.start, agent.kill, agent.forget
        self.feed, self.sample = agent.feed, agent.sample
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

    def take(self, worker_id: str, number: int) -> tuple[Any, Any]:
        """Store a block of a worker; return the references to it and to its size. Raises :class:`BlockLost`."""
        try:
            block, size = self._agent.take(worker_id, number)
        except KeyError as error:  # what an actor raises comes as BlockLost already
            raise BlockLost(f"worker {worker_id} was forgotten, and its block {number} with it") from error
        return self._store.put(block), self._store.put(size)

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


Agent = OwnAgent | RemoteAgent


class Agents:
    """Starts the agents of a run as its workers get places. Any thread may use it."""

    def __init__(
        self,
        run: RunOnNodes,
        sent: bytes,
        driver_node: str,
        on_exits: Callable[[list[Exit]], None],
        on_lost: Callable[[str], None],
    ) -> None:
        """Both functions are called on another thread and must not wait.

        ``sent`` is the archive of the user's code. ``on_exits`` gets workers that have ended, ``on_lost`` the id of the
        node of an agent that has ended by itself.
        """
        self._run = run
        self._sent = sent
        self._archive: Any = None  # the reference to it, once another node needs it
        self._archive_lock = threading.Lock()
        self._driver_node = driver_node
        self._on_exits = on_exits
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._agents: dict[str, Future[Agent]] = {}
        self._is_closed = False

    def at(self, node_id: str) -> Agent:
        """Return the agent of a node. Waits while it starts, and installs packages.

        Raises :class:`WorkerStartFailed` if these can't be installed, and :class:`BlockLost` if the node is lost.
        """
        with self._lock:
            if self._is_closed:
                raise BlockLost("the run has ended")
            future = self._agents.get(node_id)
            is_first = future is None
            if future is None:
                future = self._agents[node_id] = Future()
        if is_first:
            try:
                agent = self._own() if node_id == self._driver_node else self._start(node_id)
            except BaseException as error:
                with self._lock:
                    if self._agents.get(node_id) is future:
                        del self._agents[node_id]
                future.set_exception(error)
            else:
                self._keep(agent, future)
        try:
            # As long as the thread that starts it waits, and a moment more.
            return future.result(_START_TIMEOUT_S + INSTALL_TIMEOUT_S + 1.0)
        except TimeoutError as error:
            raise BlockLost(f"the agent of node {node_id[:8]} has not started in time") from error

    def _keep(self, agent: Agent, future: Future[Agent]) -> None:
        with self._lock:
            is_wanted = self._agents.get(agent.node_id) is future and not self._is_closed
            if is_wanted:
                future.set_result(agent)
        if is_wanted:
            agent.listen()
        else:  # the run has ended meanwhile, or the node was given up
            agent.close()
            agent.end()
            future.set_exception(BlockLost(f"the agent of node {agent.node_id[:8]} is not needed any more"))

    def _own(self) -> OwnAgent:
        return OwnAgent(NodeAgent(self._run, self._sent, is_driver=True), self._driver_node, self._on_exits)

    def _start(self, node_id: str) -> RemoteAgent:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        store = RayStore()
        with self._archive_lock:
            if self._archive is None:
                self._archive = store.put(np.frombuffer(self._sent, np.uint8))
        made: Any = ray.remote(NodeAgent)
        actor = made.options(
            num_cpus=0,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=_CONCURRENT_CALLS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        ).remote(self._run, self._archive)
        try:
            store.get(actor.ping.remote(), _START_TIMEOUT_S, lambda: self._is_closed)
            store.get(actor.install.remote(), INSTALL_TIMEOUT_S, lambda: self._is_closed)
        except BlockLost as error:
            ray.kill(actor, no_restart=True)
            if isinstance(cause := getattr(error.__cause__, "cause", None), WorkerStartFailed):
                raise cause from error
            raise BlockLost(f"the agent of node {node_id[:8]} can't start: {error.message}") from error
        return RemoteAgent(node_id, actor, self._on_exits, self._lost)

    def _lost(self, agent: RemoteAgent) -> None:
        with self._lock:
            future = self._agents.get(agent.node_id)
            if self._is_closed or future is None or not future.done() or future.result() is not agent:
                return  # it was closed or given up
            del self._agents[agent.node_id]
        self._on_lost(agent.node_id)

    def give_up(self, node_id: str) -> None:
        """Forget a node that does not answer, and end its agent when it does again."""
        agent = self.known(node_id)
        with self._lock:
            self._agents.pop(node_id, None)
        if agent is not None:
            agent.end()

    def release(self, node_id: str) -> None:
        """End the agent of a node that has no workers, and remove its folder. Waits for it, with a limit."""
        import ray
        from ray.exceptions import RayError

        agent = self.known(node_id)
        with self._lock:
            self._agents.pop(node_id, None)
        if not isinstance(agent, RemoteAgent):
            return
        answer = agent.close()
        if ray.wait([answer], timeout=_CLOSE_TIMEOUT_S)[0]:
            with contextlib.suppress(RayError):  # its node is gone
                _tell_of_files(node_id, ray.get(answer))
        agent.end()

    def is_asked_for(self, node_id: str) -> bool:
        """Return whether the agent of a node has started, or is starting."""
        with self._lock:
            return node_id in self._agents

    def known(self, node_id: str) -> Agent | None:
        """Return the agent of a node if it has started and was not given up."""
        with self._lock:
            future = self._agents.get(node_id)
        return future.result() if future is not None and future.done() and future.exception() is None else None

    def all(self) -> list[Agent]:
        """Return the agents that have started."""
        with self._lock:
            futures = list(self._agents.values())
        return [each.result() for each in futures if each.done() and each.exception() is None]

    def on_other_nodes(self) -> list[RemoteAgent]:
        """Return the agents that have started, without that of the driver's own node."""
        return [each for each in self.all() if isinstance(each, RemoteAgent)]

    def close(self) -> None:
        """Remove the folders and end the agents."""
        import ray
        from ray.exceptions import RayError

        with self._lock:
            self._is_closed = True
        agents = self.all()
        closing = {agent.close(): agent.node_id for agent in agents if isinstance(agent, RemoteAgent)}
        written = {agent.node_id: agent.close() for agent in agents if isinstance(agent, OwnAgent)}
        if closing:
            answered, _ = ray.wait(list(closing), num_returns=len(closing), timeout=_CLOSE_TIMEOUT_S)
            for reference in answered:
                with contextlib.suppress(RayError):  # its node is gone
                    written[closing[reference]] = ray.get(reference)
        for agent in agents:
            agent.end()
        self._archive = None
        for node_id, files in written.items():
            _tell_of_files(node_id, files)


def _tell_of_files(node_id: str, files: list[str]) -> None:
    """Warn of files that are gone with the folder of a node."""
    if files:
        _LOGGER.warning(
            "what steps on node %s wrote to relative paths ends with the run, since workers ran in a copy of the "
            "working folder: %s. Write to a place that all nodes see",
            node_id[:8],
            list_some(files, _SHOWN),
        )
