"""Blocks as objects of the cluster, on the driver's side: who holds copies, and how workers get them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.engine.cluster.agent.block_desk import LAST_READ_S, RayStore, Store, read_first, span_of
from luminosity.engine.cluster.driver.agents import RemoteAgent
from luminosity.engine.data import wire
from luminosity.errors import BlockLost

__all__ = ["ObjectTable", "RemoteObject", "object_keys"]

_LOGGER = logging.getLogger(__name__)

_COPY_TIMEOUT_S = 10.0  # then another node is asked for a copy
_COPIES_AT_ONCE = 32  # that are requested after the loss of a node; more would only wait for each other
_TAKE_TIMEOUT_S = 60.0  # for a worker to store a block: its node may have to spill others first
_ADVICE = (
    "start the pipeline again; with --checkpoint_dir=DIR, a folder that all nodes see, blocks are files there, and a "
    "run continues where it was"
)


@dataclass(eq=False)
class RemoteObject:
    """A block in the stores of the cluster: one copy on the driver's node, or two on other nodes."""

    key: str
    size: int
    table: ObjectTable
    copies: dict[str, Any] = field(default_factory=dict[str, Any])  # node → reference
    is_secured: bool = False  # whether the loop may have heard of it; before that, its worker's bundle can be repeated

    def message(self, first: int, count: int, size: int) -> bytes:
        """Return the message that hands elements to a worker."""
        return wire.pack_object(count, wire.ObjectSpan(self.key, first, size))

    def read(self, first: int, count: int) -> bytes:
        """Fetch elements into this process."""
        return span_of(self.table.fetch(self), first, count).tobytes()

    def free(self) -> None:
        """Drop the references, so that the cluster frees the data."""
        self.table.drop(self)


@dataclass(frozen=True)
class _Copy:
    """A copy that a node was asked for."""

    node_id: str
    reference: Any
    size: Any


class ObjectTable:
    """All blocks of a run that are objects. Any thread may use it.

    The threads that receive the messages of workers call :meth:`secure`, which waits. The loop's thread finds, reads
    and frees what they have secured. Every wait has a limit, and ends early with the run or with its worker.
    """

    def __init__(self, driver_node: str, store: Store | None = None) -> None:
        self._driver_node = driver_node
        self._store = store or RayStore()
        self._lock = threading.Lock()
        self._arrived: dict[str, RemoteObject] = {}  # secured, and not yet found by the loop
        self._objects: dict[str, RemoteObject] = {}  # all, by key
        self._keepers: dict[str, RemoteAgent] = {}  # by node
        self._held: dict[str, int] = {}  # bytes of copies on each node
        self._gone_workers: set[str] = set()
        self._lost_nodes: set[str] = set()
        self._leaving_nodes: set[str] = set()
        self._is_closed = False

    # Nodes

    def add_keeper(self, keeper: RemoteAgent) -> None:
        """Use a node for copies. It may be one that was lost and is back, with empty hands."""
        with self._lock:
            self._lost_nodes.discard(keeper.node_id)
            self._keepers[keeper.node_id] = keeper

    def node_lost(self, node_id: str) -> None:
        """Forget the copies on a node, and make new ones of blocks that have only one copy left. Waits for them."""
        with self._lock:
            self._lost_nodes.add(node_id)
            self._keepers.pop(node_id, None)
            self._held.pop(node_id, None)
            hurt = [each for each in self._objects.values() if each.copies.pop(node_id, None) is not None]
        self._renew(node_id, [each for each in hurt if each.is_secured])  # of the others, secure() takes care

    def bytes_on_nodes(self) -> dict[str, int]:
        """Return the bytes of the copies on each node that holds some."""
        with self._lock:
            return {node_id: held for node_id, held in self._held.items() if held}

    def node_leaves(self, node_id: str) -> None:
        """Copy the blocks of a node that will be gone soon, and ask it for no more copies. Waits for them."""
        with self._lock:
            self._leaving_nodes.add(node_id)
            hurt = [each for each in self._objects.values() if node_id in each.copies]
        self._renew(node_id, hurt)

    def move_from(self, node_id: str) -> bool:
        """Copy the blocks of a node elsewhere and forget those there. Returns False if some have no other copy.

        The node gets no new copies meanwhile; afterwards it is as if it were not there. Waits.
        """
        with self._lock:
            self._leaving_nodes.add(node_id)
            held = [each for each in self._objects.values() if node_id in each.copies]
        lost = self._make_safe(held, lambda: False)
        with self._lock:
            self._leaving_nodes.discard(node_id)
            if lost or self._is_closed:
                return False
            self._lost_nodes.add(node_id)  # until it has an agent again
            self._keepers.pop(node_id, None)
            self._held.pop(node_id, None)
            for each in self._objects.values():
                each.copies.pop(node_id, None)
        return True

    def _renew(self, node_id: str, blocks: Sequence[RemoteObject]) -> None:
        lost = self._make_safe(blocks, lambda: False)
        if lost and not self._is_closed:
            count = len(lost), len(blocks)
            _LOGGER.warning("%d of %d blocks on node %s have no other copy: %s", *count, node_id[:8], lost[0].message)
        else:
            _LOGGER.info("%d blocks on node %s have other copies again", len(blocks), node_id[:8])

    # Blocks that workers make

    def secure(self, worker_id: str, node_id: str, take: Callable[[int], tuple[Any, Any]], keys: Iterable[str]) -> None:
        """Take over blocks of a worker and wait until the loss of one node can't lose them.

        ``take`` returns the references to a block and to its size. Raises :class:`BlockLost`.
        """

        def is_over() -> bool:
            return worker_id in self._gone_workers

        taken: list[tuple[str, Any, Any]] = []
        for key in keys:
            reference, size = take(int(key.rpartition(".")[2]))
            taken.append((key, reference, size))
        made: list[RemoteObject] = []
        try:
            for key, reference, size in taken:
                found = RemoteObject(key, int(self._get(size, _TAKE_TIMEOUT_S, is_over)), self)
                made.append(found)
                with self._lock:
                    self._objects[key] = found
                    self._hold(found, node_id, reference)
            while not all(each.is_secured for each in made):
                if lost := self._make_safe(made, is_over):
                    raise lost[0]
                with self._lock:
                    if is_over() or self._is_closed:
                        raise BlockLost(f"worker {worker_id} was given up")
                    if all(map(self._is_safe, made)):  # otherwise a node was lost just now
                        for each in made:
                            each.is_secured = True
                        self._arrived.update((each.key, each) for each in made)
        except BaseException:
            with self._lock:
                for each in made:
                    self._forget(each)
            raise

    def _get(self, reference: Any, seconds: float, is_over: Callable[[], bool]) -> Any:
        return self._store.get(reference, seconds, lambda: self._is_closed or is_over())

    def _make_safe(self, blocks: Iterable[RemoteObject], is_over: Callable[[], bool]) -> list[BlockLost]:
        """Make second copies where they are needed. Returns why some have none."""
        lost: list[BlockLost] = []
        left: list[tuple[RemoteObject, set[str]]] = [(each, set()) for each in blocks]  # with nodes that failed
        while left:
            now, left = left[:_COPIES_AT_ONCE], left[_COPIES_AT_ONCE:]
            begun: list[tuple[RemoteObject, set[str], _Copy]] = []
            for made, failed in now:
                try:
                    if (copy := self._begin_copy(made, failed, is_over)) is not None:
                        begun.append((made, failed, copy))
                except BlockLost as error:
                    lost.append(error)
            for made, failed, copy in begun:
                failed.add(copy.node_id)  # unless it succeeds, which the next look sees
                try:
                    self._get(copy.size, _COPY_TIMEOUT_S, is_over)
                except BlockLost as error:
                    _LOGGER.debug("node %s made no copy: %s", copy.node_id, error)
                else:
                    with self._lock:
                        self._hold(made, copy.node_id, copy.reference)
                left.append((made, failed))  # another node may be gone meanwhile
        return lost

    def _begin_copy(self, made: RemoteObject, failed: set[str], is_over: Callable[[], bool]) -> _Copy | None:
        """Ask a node for a copy of a block that needs one. Raises :class:`BlockLost` if there is none any more."""
        with self._lock:
            staying = self._staying(made)
            if made.key not in self._objects or self._is_safe(made):
                return None
            if not made.copies:
                raise BlockLost(f"all nodes that held block {made.key} are gone")
            source = staying[0] if staying else next(iter(made.copies.values()))
            keeper = self._choose(set(made.copies) | failed)
        if keeper is not None:
            return _Copy(keeper.node_id, *keeper.copy(source))
        # No node is left but that of this process, which needs no agent for it.
        own = self._store.put(self._get(source, LAST_READ_S, is_over))
        with self._lock:
            self._hold(made, self._driver_node, own)
        return None

    def _staying(self, made: RemoteObject) -> list[Any]:
        """Return the references to the copies on nodes that will not leave soon."""
        return [reference for node, reference in made.copies.items() if node not in self._leaving_nodes]

    def _is_safe(self, made: RemoteObject) -> bool:
        """Return whether the loss of one node can't lose a block.

        The end of the driver's node is the end of the run anyway, so one copy there is enough.
        """
        return self._driver_node in made.copies or len(self._staying(made)) > 1

    def _choose(self, without: set[str]) -> RemoteAgent | None:
        """Return the node that holds the fewest bytes of copies."""
        free = [each for node, each in self._keepers.items() if node not in without | self._leaving_nodes]
        return min(free, key=lambda keeper: self._held.get(keeper.node_id, 0), default=None)

    def _hold(self, made: RemoteObject, node_id: str, reference: Any) -> None:
        """Note a copy, unless its node was lost or the block dropped while it was made."""
        if node_id not in self._lost_nodes and made.key in self._objects:
            made.copies[node_id] = reference
            self._held[node_id] = self._held.get(node_id, 0) + made.size

    def worker_gone(self, worker_id: str) -> None:
        """Free what a lost worker has sent and the loop has not received: it never will.

        Call it once the loop takes nothing more of that worker.
        """
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
        """Return the references to the copies of a block, the best first. Raises :class:`BlockLost` if all are gone."""
        with self._lock:
            found = self._objects[key].copies
            if not found:
                raise BlockLost(f"all nodes of the cluster that held a copy of block {key} are gone", fix=_ADVICE)
            return [found[node] for node in sorted(found, key=lambda node: node in self._leaving_nodes)]

    def fetch(self, found: RemoteObject) -> tuple[Any, Any]:
        """Return a block's value. Waits for another node, unless the driver's has it."""
        try:
            return read_first(
                self.copies(found.key), lambda reference, seconds: self._get(reference, seconds, lambda: False)
            )
        except BlockLost as error:
            raise BlockLost(f"block {found.key}: {error.message}", fix=_ADVICE) from error

    def drop(self, found: RemoteObject) -> None:
        """Forget a block."""
        with self._lock:
            self._forget(found)

    def _forget(self, found: RemoteObject) -> None:
        self._objects.pop(found.key, None)
        for node in found.copies:
            if node in self._held:
                self._held[node] -= found.size
        found.copies.clear()

    def clear(self) -> None:
        """Forget all blocks, at the end of a run, and end all waits."""
        with self._lock:
            self._is_closed = True
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
