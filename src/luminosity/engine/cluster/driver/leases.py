"""Workers on nodes, as the driver sees them: the lease that gives one its node, and the process that has it.

A lease is what the cluster has set aside for a worker: a placement group of Ray with one bundle.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from luminosity.engine.resources.machine import LeaseNeeds, detect_accelerators
from luminosity.engine.workers.launcher import OnExit
from luminosity.errors import BlockLost
from luminosity.extras import require

__all__ = ["KILLED", "Leases", "NodeProcess", "bundle_of"]

_LOGGER = logging.getLogger(__name__)

_FIRST_LOOK_S = 0.01  # Ray gives what is free within milliseconds
_LONGEST_PAUSE_S = 1.0  # between two looks at a lease that waits for resources
_DEVICES_TIMEOUT_S = 60.0  # for a node to say which devices a lease has: a process may have to start for that
_END_S = 5.0  # for the thread to end
_LITTLE = 0.001  # of the resource that says the type of accelerators: it only chooses the node

KILLED = -9  # the exit code of a worker that is gone, as if a signal had killed it
_USUAL_START_S = 10.0  # of a worker's place, on a busy cluster
_KILL_TIMEOUT_S = 3.0  # for its node to confirm the end of a worker; a frozen one never does


def bundle_of(needs: LeaseNeeds) -> dict[str, float]:
    """Return the needs as resources of Ray; empty if the worker needs none of its own.

    >>> bundle_of(LeaseNeeds(cpus=1, memory=1 << 30, gpus=2, accelerator_type="L4"))
    {'CPU': 1, 'memory': 1073741824, 'GPU': 2, 'accelerator_type:L4': 0.001}
    """
    resources: dict[str, float] = {
        "CPU": needs.cpus,
        "memory": needs.memory,
        needs.accelerator_kind.upper(): needs.gpus,
    }
    if needs.accelerator_type:
        resources[f"accelerator_type:{needs.accelerator_type}"] = _LITTLE
    return {name: amount for name, amount in resources.items() if amount}


@dataclass
class _Lease:
    """One worker's lease."""

    group: Any
    needs: LeaseNeeds
    avoided: frozenset[str]  # nodes on which it is not placed
    on_placed: Callable[[str], None]
    look_at: float
    pause_s: float = _FIRST_LOOK_S
    is_placed: bool = False


class Leases:
    """The leases of a run, by worker. Any thread may use it. Ray ends them all when the driver is gone."""

    def __init__(self) -> None:
        self._leases: dict[str, _Lease] = {}
        self._turns: dict[str, threading.Lock] = {}  # by node: who asks it for devices
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="luminosity-leases", daemon=True)
        self._thread.start()

    def ask(self, worker_id: str, needs: LeaseNeeds, avoided: frozenset[str], on_placed: Callable[[str], None]) -> None:
        """Ask the cluster for what a worker needs, if possible on ``needs.node``, and never on nodes to be avoided.

        The plan has found room for all workers. If Ray spread them at will, small ones could take the last node on
        which a large one fits, and the pool of the large one would never start.

        ``on_placed`` gets the node's id, on another thread, and must not wait.
        """
        group = _group(needs, avoided)
        with self._lock:
            self._leases[worker_id] = _Lease(group, needs, avoided, on_placed, time.monotonic() + _FIRST_LOOK_S)
        self._changed.set()

    def ask_again(self, avoided: frozenset[str]) -> None:
        """Ask anew for those that still wait and may have a place on a node that is no longer avoided."""
        with self._lock:
            waiting = [each for each in self._leases.values() if not each.is_placed and each.avoided - avoided]
        for lease in waiting:
            spare = _group(lease.needs, avoided)
            with self._lock:
                if lease in self._leases.values() and not lease.is_placed:
                    lease.group, spare = spare, lease.group
                    lease.avoided = avoided
                    lease.pause_s = _FIRST_LOOK_S
                    lease.look_at = time.monotonic() + _FIRST_LOOK_S
            require("ray.util.placement_group", "ray").remove_placement_group(spare)
        self._changed.set()

    def devices(self, worker_id: str, node_id: str, needs: LeaseNeeds) -> tuple[str, ...]:
        """Return the accelerators that belong to a placed lease. Waits for the node; raises :class:`BlockLost`.

        Ray starts a process for the first question to a node, and for each further one at the same time. So they go
        one by one, and the same process answers them all.
        """
        if not needs.gpus:
            return ()
        with self._lock:
            turn = self._turns.setdefault(node_id, threading.Lock())
        with turn:
            return self._ask_for_devices(worker_id, needs)

    def _ask_for_devices(self, worker_id: str, needs: LeaseNeeds) -> tuple[str, ...]:
        ray = require("ray", "ray")
        strategies = require("ray.util.scheduling_strategies", "ray")
        with self._lock:
            lease = self._leases.get(worker_id)
        if lease is None:  # also if its node was lost while others asked
            raise BlockLost("the worker's lease has ended")
        kind = {"num_gpus": needs.gpus} if needs.accelerator_kind == "gpu" else {"resources": {"TPU": needs.gpus}}
        asked = ray.remote(_given_devices).options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(lease.group),
            **kind,
        )
        try:
            return ray.get(asked.remote(), timeout=_DEVICES_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            raise BlockLost(f"a node does not say which accelerators a worker has: {error}") from error

    def release(self, worker_id: str) -> None:
        """Give back what a worker had, or was waiting for. May be repeated."""
        with self._lock:
            lease = self._leases.pop(worker_id, None)
        if lease is not None:
            require("ray.util.placement_group", "ray").remove_placement_group(lease.group)

    def close(self) -> None:
        """Give everything back."""
        self._closed.set()
        self._changed.set()
        self._thread.join(_END_S)
        for worker_id in list(self._leases):
            self.release(worker_id)

    def _look(self) -> None:
        """See which leases have a place, again and again: Ray does not tell."""
        while not self._closed.is_set():
            with self._lock:
                waiting = [each for each in self._leases.values() if not each.is_placed]
            now = time.monotonic()
            for lease in waiting:
                if lease.look_at <= now and not self._closed.is_set():
                    try:
                        self._look_at(lease)
                    except Exception as error:  # Ray's head may be busy, and raises various errors
                        _LOGGER.debug("the cluster does not say where a worker has its place: %r", error)
                        lease.look_at = time.monotonic() + _LONGEST_PAUSE_S
            soonest = min((each.look_at for each in waiting if not each.is_placed), default=now + _LONGEST_PAUSE_S)
            self._changed.wait(max(0.001, soonest - time.monotonic()))
            self._changed.clear()

    def _look_at(self, lease: _Lease) -> None:
        group = lease.group
        table = require("ray.util.placement_group", "ray").placement_group_table(group)
        with self._lock:
            if lease.group is not group:
                return  # it was asked for anew meanwhile
            lease.is_placed = table.get("state") == "CREATED"
            if not lease.is_placed:
                lease.pause_s = min(2 * lease.pause_s, _LONGEST_PAUSE_S)
                lease.look_at = time.monotonic() + lease.pause_s
        if lease.is_placed:
            lease.on_placed(table["bundles_to_node_id"][0])


def _group(needs: LeaseNeeds, avoided: frozenset[str]) -> Any:
    """Ask the cluster for the needs of a worker."""
    options: dict[str, Any] = {}
    if avoided:
        options["bundle_label_selector"] = [{"ray.io/node-id": f"!in({','.join(sorted(avoided))})"}]
    if needs.node and needs.node not in avoided:
        options["_soft_target_node_id"] = needs.node
    groups = require("ray.util.placement_group", "ray")
    return groups.placement_group([bundle_of(needs)], strategy="STRICT_PACK", **options)


def _given_devices() -> tuple[str, ...]:
    """Return the accelerators that Ray has given to this task; those that are only declared have another name."""
    import ray

    given: dict[str, list[str]] = ray.get_runtime_context().get_accelerator_ids()
    real = {device.partition(":")[0] for device in detect_accelerators()}
    return tuple(
        f"{kind.lower() if kind.lower() in real else 'declared'}:{number}"
        for kind, numbers in given.items()
        for number in numbers
    )


class NodeProcess:
    """One worker: knows where it is and whether it has ended. Any thread may use it."""

    pid = 0  # of another machine, so that nobody here may look at it or signal it

    def __init__(
        self,
        worker_id: str,
        needs: LeaseNeeds,
        *,
        on_exit: OnExit,
        on_killed: Callable[[NodeProcess], None],
        on_ended: Callable[[NodeProcess], None],
    ) -> None:
        """``on_exit`` gets the exit code. ``on_killed`` is called to end the process, ``on_ended`` after its end."""
        self.worker_id = worker_id
        self.needs = needs
        self.node_id = ""  # empty until it has a place
        self.is_killed = False
        self._asked_at = time.monotonic()
        self._is_leaving = False
        self._on_exit: OnExit | None = on_exit
        self._on_killed = on_killed
        self._on_ended = on_ended
        self._has_ended = threading.Event()
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()

    def kill(self) -> None:
        """End the process. Reports the end even if its node never confirms it: the worker is refused from then on."""
        with self._lock:
            if self.is_killed or self.has_ended:
                return
            self.is_killed = True
            self._timer = threading.Timer(_KILL_TIMEOUT_S, self.ended, (KILLED,))
            self._timer.daemon = True
            self._timer.start()
        self._on_killed(self)

    def waits_for(self) -> str:
        """Return the resources that the cluster has not given yet. The first seconds may be those of a usual start."""
        is_starting = self.node_id or time.monotonic() - self._asked_at < _USUAL_START_S
        return "" if is_starting else self.needs.words

    def node(self) -> str:
        """Return the id of its node; empty until it has a place."""
        return self.node_id

    def is_leaving(self) -> bool:
        """Return whether the worker's node will be gone soon."""
        return self._is_leaving

    def leave(self) -> None:
        """Note that the node will be gone soon."""
        self._is_leaving = True

    def ended(self, code: int) -> None:
        """Report the end, once."""
        with self._lock:
            if self.has_ended:
                return
            self._has_ended.set()
            # A timer may hold this object for seconds; it must not hold the run, and the files that it reads.
            on_exit, self._on_exit = self._on_exit, None
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        self._on_ended(self)
        if on_exit is not None:
            on_exit(code)

    @property
    def has_ended(self) -> bool:
        """Whether the end was reported."""
        return self._has_ended.is_set()
