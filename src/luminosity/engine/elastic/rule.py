"""The rule for the size of a pool that grows and shrinks. The run's loop and simulations ask it; nothing starts here.

A pool gets as many workers as finish the work that is left within the horizon::

    wanted  = work that is left, in seconds of one worker / horizon
    horizon = the longer of 60 s and five times what a worker takes to start

So each worker has work for at least half the horizon, which is more than twice as long as it takes to start: nobody
waits, or pays, for a machine that comes when the work is done.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["USUAL_START_S", "Idle", "Limits", "comes_too_late", "horizon", "to_end", "wanted"]

_LEAST_HORIZON_S = 60.0  # a run that ends a minute earlier is rarely worth another machine
_STARTS = 5  # times its start, a worker should work
USUAL_START_S = 60.0  # of a machine in a cloud and the worker on it, until one was measured


@dataclass(frozen=True)
class Limits:
    """How many workers a pool has at least and at most."""

    least: int = 0
    most: int = 1


def horizon(start_s: float) -> float:
    """Return in how many seconds the work that is left should be done, if a worker takes ``start_s`` to start.

    >>> horizon(2.0), horizon(90.0)
    (60.0, 450.0)
    """
    return max(_LEAST_HORIZON_S, _STARTS * start_s)


def wanted(work_s: float, start_s: float, limits: Limits) -> int:
    """Return how many workers a pool should have for ``work_s`` seconds of one worker's work.

    >>> [wanted(work_s, 30.0, Limits(0, 8)) for work_s in (0.0, 20.0, 150.0, 151.0, 600.0, 1e6)]
    [0, 1, 1, 2, 4, 8]
    """
    return max(limits.least, min(limits.most, math.ceil(work_s / horizon(start_s))))


def comes_too_late(work_s: float, up: int, start_s: float) -> bool:
    """Return whether the workers that are up are done before one more, which is still to start, could begin."""
    return up > 0 and work_s / up <= start_s


@dataclass(frozen=True)
class Idle:
    """A worker that has had nothing to do for as long as a worker may."""

    worker: str
    pool: str
    node: str
    has_accelerator: bool


def to_end(idle: Iterable[Idle], spare: Mapping[str, int], on_node: Mapping[str, int]) -> list[str]:
    """Return which workers should end: of each pool at most as many as it can ``spare``.

    Those with accelerators come first, since they cost most, and then those on nodes with few workers, so that a node
    is empty soon and can be given back. ``on_node`` has the number of workers on each node.
    """
    left = dict(spare)
    found: list[str] = []
    order = sorted(idle, key=lambda each: (not each.has_accelerator, on_node.get(each.node, 0), each.node, each.worker))
    for each in order:
        if left.get(each.pool, 0) > 0:
            left[each.pool] -= 1
            found.append(each.worker)
    return found
