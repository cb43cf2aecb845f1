"""What the driver asks of Ray: the nodes of the cluster, and calls on other threads, which end with the run.

Python's own pool of threads refuses work once the main thread has ended.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any

from luminosity.engine.resources.machine import Node
from luminosity.errors import MissingExtra
from luminosity.extras import require

__all__ = ["Calls", "Threads", "answers", "is_alive", "known_types", "leaving", "node_of", "nodes"]

_TYPE = "accelerator_type:"  # a resource of nodes with an accelerator; the type follows
_POLL_S = 0.1  # between two looks at an answer
_LATE_S = 1.0  # between two questions to the cluster whether a node that has not answered is dead
_KINDS = {"GPU": "gpu", "TPU": "tpu"}  # Ray's resources that are accelerators, with our names
_LOGGER = logging.getLogger(__name__)
_END_S = 3.0  # for threads to leave their calls of Ray, before the connection to it is closed


def nodes() -> list[Node]:
    """Return the nodes that are alive, that of this process first. The process must be connected."""
    ray = require("ray", "ray")
    here: str = ray.get_runtime_context().get_node_id()
    found = [node_of(each, here) for each in ray.nodes() if each["Alive"]]
    return sorted(found, key=lambda node: (not node.is_driver, node.address, node.id))


def is_alive(node_id: str) -> bool:
    """Return whether the cluster counts a node as alive. A node that is frozen is alive for some time."""
    return any(each["NodeID"] == node_id and each["Alive"] for each in require("ray", "ray").nodes())


def answers(node_id: str, seconds: float, stop: threading.Event) -> bool:
    """Return whether a node answers: it runs a task. Returns False as soon as ``stop`` is set.

    After some seconds the cluster knows whether a node is dead. One that is not may be too busy to answer earlier.
    """
    ray = require("ray", "ray")
    place = require("ray.util.scheduling_strategies", "ray").NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(_nothing).options(num_cpus=0, max_retries=0, scheduling_strategy=place)
    reference = task.remote()
    deadline = time.monotonic() + seconds
    while not ray.wait([reference], timeout=0)[0]:
        is_late = time.monotonic() > deadline
        if stop.wait(_POLL_S) or (is_late and not is_alive(node_id)):
            ray.cancel(reference)
            return False
        deadline = time.monotonic() + _LATE_S if is_late else deadline
    try:
        ray.get(reference)
    except ray.exceptions.RayError:
        return False  # it is dead
    return True


def _nothing() -> None:
    pass


def leaving() -> frozenset[str]:
    """Return the ids of nodes that Ray drains: a preemption was announced, or the autoscaler takes them away."""
    try:
        # Ray's public API does not tell; its own libraries ask this.
        draining: Mapping[str, int] = require("ray._private.state", "ray").state.get_draining_nodes()
    except (AttributeError, MissingExtra):
        return frozenset()  # another version of Ray: nodes then leave without a warning
    return frozenset(draining)


def node_of(entry: Mapping[str, Any], here: str) -> Node:
    """Return a node from an entry of ``ray.nodes()``. ``here`` is the id of this process's node.

    >>> resources = {"CPU": 4.0, "GPU": 2.0, "memory": 8e9, "object_store_memory": 1e9, "accelerator_type:T4": 1.0}
    >>> node = node_of({"NodeID": "a", "NodeManagerAddress": "10.0.0.1", "Resources": resources}, here="b")
    >>> node.cores, node.accelerators, node.accelerator_type, node.is_driver
    (4.0, 2.0, 'T4', False)
    """
    resources: Mapping[str, float] = entry["Resources"]
    name = next((name for name in _KINDS if resources.get(name)), "GPU")
    types = [key.removeprefix(_TYPE) for key in sorted(resources) if key.startswith(_TYPE)]
    return Node(
        id=entry["NodeID"],
        address=entry["NodeManagerAddress"],
        cores=float(resources.get("CPU", 0.0)),
        ram_bytes=int(resources.get("memory", 0)),
        accelerators=float(resources.get(name, 0.0)),
        accelerator_type=types[0] if types else "",
        object_store_bytes=int(resources.get("object_store_memory", 0)),
        is_driver=entry["NodeID"] == here,
        accelerator_kind=_KINDS[name],
        more_types=tuple(types[1:]),
    )


def known_types() -> tuple[str, ...]:
    """Return the types of accelerators that Ray has names for, such as ``T4``."""
    constants: Mapping[str, Any] = vars(require("ray.util.accelerators.accelerators", "ray"))
    values = (value for name, value in constants.items() if not name.startswith("_"))
    return tuple(sorted({value for value in values if isinstance(value, str)}))


class Calls:
    """Knows which threads are inside Ray. Any thread may use it. The owner closes it."""

    def __init__(self) -> None:
        self.closed = threading.Event()
        self._lock = threading.Lock()
        self._count = 0

    @contextlib.contextmanager
    def one(self) -> Generator[bool]:
        """Within the context, :meth:`close` waits for this thread. Gives False if it has been called already."""
        with self._lock:
            may_begin = not self.closed.is_set()
            self._count += may_begin
        try:
            yield may_begin
        finally:
            with self._lock:
                self._count -= may_begin

    def submit(self, threads: Threads, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function on one of the threads, unless the run has ended. Does not wait."""
        with self._lock:
            if not self.closed.is_set():
                threads.submit(functools.partial(self._call, function, *arguments))

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        with self.one() as may_begin:
            if not may_begin:
                return
            try:
                function(*arguments)
            except Exception:  # the thread would swallow it
                if not self.closed.is_set():
                    _LOGGER.exception("the driver could not handle an event of the cluster")

    def close(self) -> None:
        """Let no more calls begin."""
        with self._lock:
            self.closed.set()

    def wait(self) -> None:
        """Wait until all threads are outside, with a limit."""
        deadline = time.monotonic() + _END_S
        while self._count and time.monotonic() < deadline:
            time.sleep(0.01)


class Threads:
    """Up to a number of threads, which start when they are needed. Any thread may use it. The owner closes it."""

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads = 0
        self._is_closed = False

    def submit(self, call: Callable[[], None]) -> None:
        """Call a function, which raises nothing, on one of the threads. Does nothing after the end."""
        with self._lock:
            if self._is_closed:
                return
            self._calls.put(call)
            if self._idle:
                self._idle -= 1
            elif self._threads < self._most:
                self._threads += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            if not self._is_closed:
                call()
            with self._lock:
                self._idle += self._calls.empty()

    def close(self) -> None:
        """Drop the calls that wait, and end the threads after those that run."""
        with self._lock:
            self._is_closed = True
            for _ in range(self._threads):
                self._calls.put(None)
