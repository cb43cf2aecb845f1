"""The interface of a model host for steps, whether the host is in the same process or in the shared host process."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from enum import Enum, auto
from typing import Any, Protocol

from luminosity.inference.blocks import Block
from luminosity.inference.handler import Handler
from luminosity.inference.host.lane import LaneSettings
from luminosity.inference.host.model import LoadStats
from luminosity.inference.host.work import BatchStats, Outcome

__all__ = ["Ahead", "Host", "HostLane", "HostSession"]


class Ahead(Enum):
    """How far the load of a model is that was requested before there is work for it."""

    LOADING = auto()
    READY = auto()
    FAILED = auto()
    NO_ROOM = auto()


class HostLane(Protocol):
    """The queue of examples for one model version at a host."""

    handler: Handler[Any, Any, Any]
    settings: LaneSettings


class HostSession(Protocol):
    """One bundle's connection to a host; belongs to one thread."""

    def submit(self, lane: Any, prepared: Block, costs: Any, tag: Any, weights: Any = None) -> None:
        """Add a block to a lane; block while the lane is full."""
        ...

    def ready(self) -> list[Outcome]:
        """Return the outcomes that have arrived, without blocking."""
        ...

    def finish(self) -> Iterator[list[Outcome]]:
        """Yield all remaining outcomes as they arrive."""
        ...

    def take_stats(self) -> dict[Any, list[BatchStats]]:
        """Return the statistics of this session's batches, by lane."""
        ...

    def close(self) -> None:
        """Close the session and discard its examples that are not yet computed."""
        ...


class Host(Protocol):
    """A model host; its methods may be called from any thread."""

    def enter(self, key: Hashable, make_handler: Callable[[], Handler[Any, Any, Any]], settings: LaneSettings) -> Any:
        """Return the lane with this key, which the first caller creates."""
        ...

    def leave(self, lane: Any) -> None:
        """Leave a lane, once for each time that it was entered."""
        ...

    def open(self, step: Any = None) -> HostSession:
        """Open a session for the calling thread."""
        ...

    def load(self, lane: Any) -> None:
        """Block until the lane's model is in memory; raise the error of its load."""
        ...

    def load_ahead(self, lane: Any, instead_of: Any = None) -> Ahead:
        """Request a model before there is work for it, and return how far its load is."""
        ...

    def take_over(self, old: Any, new: Any) -> None:
        """Move the examples of a lane that are not yet cut into batches to another lane."""
        ...

    def take_load_stats(self, lanes: list[Any]) -> list[list[LoadStats]]:
        """Return, for each lane, the loads of its model since the last call."""
        ...
