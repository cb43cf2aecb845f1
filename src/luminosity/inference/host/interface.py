"""What a step needs of a model host, wherever that is: in this process, or in one of its own."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, Protocol

from luminosity.inference.blocks import Block
from luminosity.inference.handler import Handler
from luminosity.inference.host.host import Ahead
from luminosity.inference.host.lane import LaneSettings
from luminosity.inference.host.model import LoadStats
from luminosity.inference.host.work import BatchStats, Outcome

__all__ = ["Host", "HostLane", "HostSession"]


class HostLane(Protocol):
    """One use of a model."""

    handler: Handler[Any, Any, Any]
    settings: LaneSettings


class HostSession(Protocol):
    """One bundle's conversation."""

    def submit(self, lane: Any, prepared: Block, costs: Any, tag: Any, weights: Any = None) -> None: ...
    def ready(self) -> list[Outcome]: ...
    def finish(self) -> Iterator[list[Outcome]]: ...
    def take_stats(self) -> dict[Any, list[BatchStats]]: ...
    def close(self) -> None: ...


class Host(Protocol):
    def enter(
        self, key: Hashable, make_handler: Callable[[], Handler[Any, Any, Any]], settings: LaneSettings
    ) -> Any: ...
    def leave(self, lane: Any) -> None: ...
    def open(self, step: Any = None) -> HostSession: ...
    def load(self, lane: Any) -> None: ...
    def load_ahead(self, lane: Any, instead_of: Any = None) -> Ahead: ...
    def take_over(self, old: Any, new: Any) -> None: ...
    def take_load_stats(self, lanes: list[Any]) -> list[list[LoadStats]]: ...
