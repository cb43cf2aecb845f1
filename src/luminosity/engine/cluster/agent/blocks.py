"""Blocks in the agent of a node: those that its workers have made, and those that they will read."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np

from luminosity.errors import BlockLost

__all__ = ["FedObjects", "OutgoingBlocks", "block_value", "span_of"]

_OUTGOING_BYTES = 64 << 20  # of a worker's blocks that the driver has not taken yet; then the worker waits
_FEED_TIMEOUT_S = 120.0  # for the driver's call that names the objects of a bundle, which is on its way
_ENDED_BUNDLES = 1000  # remembered: a call that names objects is late by some bundles at most
_CHECK_EVERY_S = 1.0  # how often a wait looks whether it is over


def block_value(data: Any, ends: Any) -> tuple[Any, Any]:
    """Return a block as Ray stores it without another copy: the bytes, and where each element ends in them."""
    return np.frombuffer(data, np.uint8), np.frombuffer(ends, np.int64)


def span_of(value: tuple[Any, Any], first: int, count: int) -> Any:
    """Return ``count`` elements from number ``first`` on, as a view of the block.

    >>> from array import array
    >>> bytes(span_of(block_value(b"aabbbc", array("q", [2, 5, 6])), 1, 2))
    b'bbbc'
    """
    data, ends = value
    start = int(ends[first - 1]) if first else 0
    return data[start : int(ends[first + count - 1])]


class OutgoingBlocks:
    """Blocks that a worker has made and the driver has not taken yet. Any thread may use it."""

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[Any, Any]] = {}
        self._bytes = 0
        self._numbers = itertools.count(1)
        self._is_closed = False
        self._changed = threading.Condition()

    def add(self, value: tuple[Any, Any]) -> int:
        """Keep a block until it is taken; return its number. Waits while too many bytes are kept."""
        size = len(value[0])
        with self._changed:
            while self._bytes and self._bytes + size > _OUTGOING_BYTES and not self._is_closed:
                self._changed.wait(_CHECK_EVERY_S)  # the driver takes every block that it has heard of
            if self._is_closed:
                raise BlockLost("the worker was given up")
            number = next(self._numbers)
            self._blocks[number] = value
            self._bytes += size
            return number

    def take(self, number: int) -> tuple[tuple[Any, Any], int]:
        """Remove and return a block, and its size."""
        with self._changed:
            value = self._blocks.pop(number)
            size = len(value[0])
            self._bytes -= size
            self._changed.notify_all()
        return value, size

    def close(self) -> None:
        """Drop all blocks."""
        with self._changed:
            self._is_closed = True
            self._blocks.clear()
            self._changed.notify_all()


class FedObjects:
    """The objects that the running bundles of a worker read, as the driver names them. Any thread may use it."""

    def __init__(self) -> None:
        self._of_bundles: dict[str, dict[str, Any]] = {}
        self._ended: dict[str, None] = {}  # the last bundles that ended; a set with an order
        self._is_closed = False
        self._changed = threading.Condition()

    def feed(self, instruction_id: str, objects: dict[str, Any]) -> None:
        """Name the objects of a bundle."""
        with self._changed:
            if instruction_id not in self._ended and not self._is_closed:
                self._of_bundles.setdefault(instruction_id, {}).update(objects)
                self._changed.notify_all()

    def find(self, instruction_id: str, key: str) -> Any:
        """Return what the driver has sent for a key. Waits for it; raises :class:`BlockLost`."""
        waited = 0.0
        with self._changed:
            while key not in (objects := self._of_bundles.get(instruction_id, {})):
                if waited >= _FEED_TIMEOUT_S or self._is_closed:
                    raise BlockLost(f"the driver has not named block {key} within {waited:.0f} s")
                self._changed.wait(_CHECK_EVERY_S)
                waited += _CHECK_EVERY_S
            return objects[key]

    def end(self, instruction_id: str) -> None:
        """Drop the objects of a bundle that has ended, so that the cluster can free them."""
        with self._changed:
            self._of_bundles.pop(instruction_id, None)
            self._ended[instruction_id] = None  # objects may be named after it: the call was on its way
            while len(self._ended) > _ENDED_BUNDLES:
                del self._ended[next(iter(self._ended))]

    def close(self) -> None:
        """Drop all objects."""
        with self._changed:
            self._is_closed = True
            self._of_bundles.clear()
            self._changed.notify_all()
