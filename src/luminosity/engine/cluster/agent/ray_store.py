"""Ray's object store, with waits that end: after their time, and at once when nothing waits for the object any more."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from luminosity.errors import BlockLost

__all__ = ["LAST_READ_S", "RayStore", "Store", "read_first"]

LAST_READ_S = 60.0  # for the last copy of an object: a busy node needs long to read what it has spilled
_READ_S = 5.0  # for one copy, if there is another: its node may be gone without a word
_CHECK_EVERY_S = 0.2  # how often a wait looks whether it is over


class Store(Protocol):
    """Where objects lie."""

    def get(self, reference: Any, seconds: float, is_over: Callable[[], bool]) -> Any:
        """Return an object. Raises :class:`BlockLost` if it is not there in time, or if ``is_over`` says so."""
        ...

    def put(self, value: Any) -> Any:
        """Store an object on this process's node; return the reference."""
        ...


def read_first(copies: Sequence[Any], read: Callable[[Any, float], Any]) -> Any:
    """Return the first of the copies of an object that can be read: ``read`` gets a reference and the seconds for it.

    Raises :class:`BlockLost` if all fail with it.
    """
    failure: BlockLost | None = None
    for number, reference in enumerate(copies, 1):
        try:
            return read(reference, _READ_S if number < len(copies) else LAST_READ_S)
        except BlockLost as error:
            failure = error
    reason = failure.message if failure is not None else "there is none"
    raise BlockLost(f"found none of the {len(copies)} copies of a block: {reason}") from failure


class RayStore:
    """The store of the cluster to which this process is connected."""

    def get(self, reference: Any, seconds: float, is_over: Callable[[], bool]) -> Any:
        """Return an object. Raises :class:`BlockLost` if it is not there in time, or if ``is_over`` says so."""
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        deadline = time.monotonic() + seconds
        while True:
            try:
                return ray.get(reference, timeout=max(0.0, min(_CHECK_EVERY_S, deadline - time.monotonic())))
            except GetTimeoutError as error:
                if is_over():
                    raise BlockLost("nothing waits for the object any more") from error
                if time.monotonic() >= deadline:
                    raise BlockLost(f"an object is not there after {seconds:.0f} s") from error
            except RayError as error:
                first, *_ = f"{error}".strip().splitlines() or [""]
                raise BlockLost(f"{type(error).__name__}: {first}") from error

    def put(self, value: Any) -> Any:
        """Store an object on this process's node; return the reference."""
        import ray
        from ray.exceptions import RayError

        try:
            return ray.put(value)
        except RayError as error:
            raise BlockLost(f"{type(error).__name__}: the driver's node can't hold a copy of a block") from error
