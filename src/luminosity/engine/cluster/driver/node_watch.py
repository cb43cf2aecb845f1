"""Watches the nodes of a run: which are frozen, leave or have joined, and how busy they are."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from luminosity.engine.cluster.agent.node_load import NodeSample
from luminosity.engine.cluster.driver import ray_calls
from luminosity.engine.cluster.driver.agents import Agents, OwnAgent
from luminosity.engine.resources.machine import Node

__all__ = ["NodeSamples", "NodeWatch"]

_LOGGER = logging.getLogger(__name__)

_LOOK_S = 1.0  # between two looks
_PING_S = 5.0  # between two pings of one agent
_ANSWER_S = 20.0  # then the node counts as frozen; a busy one needs seconds
_END_S = 5.0  # for a thread to end
_EVERY_S = 2.0  # a view shows whole percents of the last seconds
_TIMEOUT_S = 2.0  # for answers; a node that is slower keeps its last sample


@dataclass
class _Ping:
    """A ping of one agent."""

    actor: Any
    reference: Any
    sent_at: float
    is_answered: bool = False


class NodeWatch:
    """Looks at the nodes of the cluster, once a second, on a thread of its own.

    The connection of a worker shows within 20 s that its node is frozen. This shows it also for nodes that only hold
    copies of blocks, or whose workers have not connected yet.
    """

    def __init__(
        self,
        agents: Agents,
        on_frozen: Callable[[str], None],
        on_leaving: Callable[[str], None],
        on_look: Callable[[], None],
    ) -> None:
        """The functions must not wait. The first two get a node's id, once for each node; ``on_look`` is for all."""
        self._agents = agents
        self._on_frozen = on_frozen
        self._on_leaving = on_leaving
        self._on_look = on_look
        self._pings: dict[str, _Ping] = {}
        self._leaving: set[str] = set()
        self._alive: tuple[Node, ...] = ()
        self._known: set[str] = set()  # nodes of the cluster so far
        self._look_for_new()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="luminosity-nodes", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        from ray.exceptions import RayError

        while not self._closed.wait(_LOOK_S):
            try:
                for node_id in ray_calls.leaving() - self._leaving:
                    self._leaving.add(node_id)
                    self._on_leaving(node_id)
                self._ping_all(time.monotonic())
                self._look_for_new()
                self._on_look()
            except RayError as error:
                _LOGGER.debug("the cluster does not say how its nodes are: %r", error)

    @property
    def alive(self) -> tuple[Node, ...]:
        """The nodes that were alive at the last look."""
        return self._alive

    def _look_for_new(self) -> None:
        """Find the nodes that are alive, and say which have joined."""
        self._alive = tuple(ray_calls.nodes())
        found = {node.id: node for node in self._alive}
        if self._known:
            for node_id in sorted({*found} - self._known):
                _LOGGER.warning("node %s (%s) has joined the cluster", found[node_id].address, node_id[:8])
        self._known |= {*found}

    def _ping_all(self, now: float) -> None:
        import ray

        agents = {agent.node_id: agent for agent in self._agents.on_other_nodes()}
        for node_id in [node_id for node_id in self._pings if node_id not in agents]:
            del self._pings[node_id]
        for node_id, agent in agents.items():
            ping = self._pings.get(node_id)
            if ping is None or ping.actor is not agent.actor or (ping.is_answered and now - ping.sent_at > _PING_S):
                self._pings[node_id] = _Ping(agent.actor, agent.actor.ping.remote(), now)
            elif not ping.is_answered:
                # An error is an answer, too: the agent has died, and its pending call says so.
                ping.is_answered = bool(ray.wait([ping.reference], timeout=0)[0])
                if not ping.is_answered and now - ping.sent_at > _ANSWER_S:
                    del self._pings[node_id]
                    self._on_frozen(node_id)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join(_END_S)


class NodeSamples:
    """Keeps the newest sample of each node, on a thread of its own. The owner stops it."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self._newest: Mapping[str, NodeSample] = {}
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="luminosity-nodes", daemon=True)
        self._thread.start()

    @property
    def newest(self) -> Mapping[str, NodeSample]:
        """The newest samples, by the id of the node."""
        return self._newest

    def stop(self) -> None:
        """Stop asking. Waits for the last answers, with a limit."""
        self._is_stopped.set()
        self._thread.join(_END_S)

    def _ask(self) -> None:
        import ray
        from ray.exceptions import RayError

        while not self._is_stopped.wait(_EVERY_S):
            agents = self._agents.all()
            found = {agent.node_id: agent.sample() for agent in agents if isinstance(agent, OwnAgent)}
            others = [agent for agent in agents if not isinstance(agent, OwnAgent)]
            asked: dict[Any, str] = {agent.actor.sample.remote(): agent.node_id for agent in others}
            found |= {node: sample for node, sample in self._newest.items() if node in asked.values()}
            ready: list[Any] = []
            if asked:
                ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_TIMEOUT_S)
            for reference in ready:
                try:
                    found[asked[reference]] = ray.get(reference)
                except RayError:
                    found.pop(asked[reference], None)  # its node is gone
            self._newest = found
