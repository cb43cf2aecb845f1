"""Blocks as objects of the cluster, on the driver's side: who holds copies, and how workers get them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.engine.actors import object_channel
from luminosity.engine.data import wire
from luminosity.errors import BlockLost

__all__ = ["Keeper", "ObjectTable", "RemoteObject"]

_LOGGER = logging.getLogger(__name__)

_COPY_TIMEOUT_S = 10.0  # then another node is asked for a copy
_TAKE_TIMEOUT_S = 60.0  # for a worker to store a block: its node may have to spill others first
_READ_TIMEOUT_S = 5.0  # for one copy, if there is another
_LAST_READ_TIMEOUT_S = 60.0


class Keeper(Protocol):
    """A node that holds copies of blocks."""

    @property
    def node_id(self) -> str: ...

    def copy(self, reference: Any) -> tuple[Any, Any]:
        """Return the references to a copy that this node will hold, and to its size, which is there once it does."""
        ...


@dataclass(eq=False)
class RemoteObject:
    """A block in the stores of the cluster: one copy on the driver's node, or two on other nodes."""

    key: str
    size: int
    table: ObjectTable
    copies: dict[str, Any] = field(default_factory=dict[str, Any])  # node → reference

    def message(self, first: int, count: int, size: int) -> bytes:
        """Return the message that hands elements to a worker."""
        return wire.pack_object(count, wire.ObjectSpan(self.key, first, size))

    def read(self, first: int, count: int) -> bytes:
        """Fetch elements into this process."""
        return object_channel.span_of(self.table.fetch(self), first, count)

    def free(self) -> None:
        """Drop the references, so that the cluster frees the data."""
        self.table.drop(self)


class ObjectTable:
    """All blocks of a run that are objects. Any thread may use it.

    The threads that receive the messages of workers call :meth:`secure`, which waits. The loop's thread finds, reads
    and frees what they have secured.
    """

    def __init__(self, driver_node: str) -> None:
        self._driver_node = driver_node
        self._lock = threading.Lock()
        self._arrived: dict[str, RemoteObject] = {}  # secured, and not yet found by the loop
        self._objects: dict[str, RemoteObject] = {}  # all, by key
        self._keepers: dict[str, Keeper] = {}  # by node
        self._held: dict[str, int] = {}  # bytes of copies on each node
        self._gone_workers: set[str] = set()
        self._lost_nodes: set[str] = set()

    # Nodes

    def add_keeper(self, keeper: Keeper) -> None:
        """Use a node for copies."""
        with self._lock:
            self._keepers[keeper.node_id] = keeper

    def node_lost(self, node_id: str) -> None:
        """Forget the copies on a node, and make new ones of blocks that have only one copy left. Waits for them."""
        with self._lock:
            self._lost_nodes.add(node_id)
            self._keepers.pop(node_id, None)
            self._held.pop(node_id, None)
            hurt = [each for each in self._objects.values() if each.copies.pop(node_id, None) is not None]
        for each in hurt:
            try:
                self._make_safe(each)
            except BlockLost as error:
                _LOGGER.warning("a block has no second copy: %s", error)

    # Blocks that workers make

    def secure(self, worker_id: str, node_id: str, take: Callable[[int], tuple[Any, Any]], keys: Iterable[str]) -> None:
        """Take over blocks of a worker and wait until the loss of one node can't lose them.

        ``take`` returns the references to a block and to its size. Raises :class:`BlockLost` or what Ray raises.
        """
        import ray

        taken: list[tuple[str, Any, Any]] = []
        for key in keys:
            reference, size = take(int(key.rpartition(".")[2]))
            taken.append((key, reference, size))
        for key, reference, size in taken:
            made = RemoteObject(key, int(ray.get(size, timeout=_TAKE_TIMEOUT_S)), self, {node_id: reference})
            with self._lock:
                self._objects[key] = made
        for key, *_ in taken:
            made = self._objects[key]
            self._make_safe(made)
            with self._lock:
                if worker_id in self._gone_workers:
                    for other, *_ in taken:
                        self._forget(self._objects[other])
                    raise BlockLost(f"worker {worker_id} was given up")
                self._arrived[key] = made

    def _make_safe(self, made: RemoteObject) -> None:
        """Make a second copy, unless one is where the driver is, whose end is the end of the run anyway."""
        import ray
        from ray.exceptions import RayError

        tried: set[str] = set()
        while True:
            with self._lock:
                for node in self._lost_nodes & set(made.copies):
                    del made.copies[node]
                copies = dict(made.copies)
            if self._driver_node in copies or len(copies) > 1:
                return
            if not copies:
                raise BlockLost(f"all nodes that held block {made.key} are gone")
            keeper = self._choose(set(copies) | tried)
            if keeper is None:
                raise BlockLost(f"found no other node that could hold a copy of block {made.key}")
            try:
                reference, size = keeper.copy(*copies.values())
                ray.get(size, timeout=_COPY_TIMEOUT_S)
            except RayError as error:
                _LOGGER.debug("node %s made no copy: %r", keeper.node_id, error)
                tried.add(keeper.node_id)
                continue
            with self._lock:
                made.copies[keeper.node_id] = reference
                self._held[keeper.node_id] = self._held.get(keeper.node_id, 0) + made.size

    def _choose(self, without: set[str]) -> Keeper | None:
        """Return the node that holds the fewest bytes of copies."""
        with self._lock:
            free = [keeper for node, keeper in self._keepers.items() if node not in without]
            return min(free, key=lambda keeper: self._held.get(keeper.node_id, 0), default=None)

    def worker_gone(self, worker_id: str) -> None:
        """Free what a lost worker has sent and the loop has not received: it never will."""
        with self._lock:
            self._gone_workers.add(worker_id)
            for key in [key for key in self._arrived if key.rpartition(".")[0] == worker_id]:
                self._forget(self._arrived.pop(key))

    # Blocks in the loop

    def find(self, key: str) -> RemoteObject:
        """Return a block that was secured. Its holder calls :meth:`RemoteObject.free` once."""
        with self._lock:
            return self._arrived.pop(key)

    def copies(self, key: str) -> list[Any]:
        """Return the references to the copies of a block, the best first."""
        with self._lock:
            found = self._objects[key].copies
            return [found[node] for node in sorted(found, key=lambda node: node in self._lost_nodes)]

    def fetch(self, found: RemoteObject) -> tuple[Any, Any]:
        """Return a block's value. Waits for another node, unless the driver's has it."""
        import ray
        from ray.exceptions import RayError

        copies = self.copies(found.key)
        failure: Exception | None = None
        for number, reference in enumerate(copies, 1):
            try:
                return ray.get(reference, timeout=_READ_TIMEOUT_S if number < len(copies) else _LAST_READ_TIMEOUT_S)
            except RayError as error:
                failure = error
        raise BlockLost(f"found none of the {len(copies)} copies of block {found.key}") from failure

    def drop(self, found: RemoteObject) -> None:
        """Forget a block."""
        with self._lock:
            self._forget(found)

    def _forget(self, found: RemoteObject) -> None:
        self._objects.pop(found.key, None)
        for node in list(found.copies)[1:]:
            if node in self._held:
                self._held[node] -= found.size
        found.copies.clear()

    def clear(self) -> None:
        """Forget all blocks, at the end of a run."""
        with self._lock:
            for found in list(self._objects.values()):
                found.copies.clear()
            self._objects.clear()
            self._arrived.clear()
            self._keepers.clear()

    @property
    def bytes(self) -> int:
        """The bytes of all blocks, without their second copies."""
        with self._lock:
            return sum(each.size for each in self._objects.values())


def object_keys(elements: beam_fn_api_pb2.Elements) -> list[str]:
    """Return the keys of the objects that a message refers to."""
    return [key for data in elements.data if (key := wire.object_key(data.data))]
