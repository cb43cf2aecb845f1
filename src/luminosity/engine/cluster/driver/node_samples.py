"""Asks the agents of a run's nodes, again and again, how busy their nodes are."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from luminosity.engine.cluster.agent.node_load import NodeSample
from luminosity.engine.cluster.driver.agents import Agents
from luminosity.engine.cluster.driver.own_agent import OwnAgent

__all__ = ["NodeSamples"]

_EVERY_S = 2.0  # a view shows whole percents of the last seconds
_TIMEOUT_S = 2.0  # for answers; a node that is slower keeps its last sample
_STOP_TIMEOUT_S = 3.0


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
        self._thread.join(_STOP_TIMEOUT_S)

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
