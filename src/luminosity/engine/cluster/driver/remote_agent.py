"""The agent of another node: an actor, whose methods the driver calls without waiting."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from luminosity.engine.cluster.agent.forked_workers import Exit
from luminosity.engine.cluster.worker.node_worker import NodeWorker
from luminosity.engine.workers.request import WorkerRequest

__all__ = ["RemoteAgent"]


class RemoteAgent:
    """Passes calls on to the actor. Any thread may use it."""

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

    def start(self, request: WorkerRequest, worker: NodeWorker) -> None:
        """Start a worker."""
        self.actor.start.remote(request, worker)

    def kill(self, worker_id: str) -> None:
        """Kill a worker."""
        self.actor.kill.remote(worker_id)

    def forget(self, worker_id: str) -> None:
        """Drop the blocks of a worker."""
        self.actor.forget.remote(worker_id)

    def take(self, worker_id: str, number: int) -> tuple[Any, Any]:
        """Return the references to a block of a worker, which this process owns, and to its size."""
        block, size = self.actor.take.options(num_returns=2).remote(worker_id, number)
        return block, size

    def feed(self, worker_id: str, instruction_id: str, objects: dict[str, Any]) -> None:
        """Name the objects that a bundle reads."""
        self.actor.feed.remote(worker_id, instruction_id, objects)

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
