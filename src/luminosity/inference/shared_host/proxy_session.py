"""One bundle's conversation with the machine's model host, which may die in the middle of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from luminosity.inference.blocks import Block, Indices, take
from luminosity.inference.host.work import BatchStats, Outcome
from luminosity.inference.ipc.channel import Channel, ConnectionClosed
from luminosity.inference.shared_host.requests import MOST_DEATHS, UnknownLane, request

if TYPE_CHECKING:
    from luminosity.inference.shared_host.proxy import SharedHost, SharedLane

__all__ = ["SharedHostSession"]


@dataclass
class _Sent:
    """A block that was handed over, and which of its examples have no outcome yet."""

    lane: SharedLane
    prepared: Block
    costs: Any
    weights: Any
    tag: Any
    places: Indices
    """What the numbers of its last sending stand for."""
    missing: Any
    """For each example, whether its outcome is still to come."""


class SharedHostSession:
    """Belongs to one thread. What it handed over it keeps until the outcome is here: then another host can do it.

    Each request has one answer, so that neither side ever waits for the other to read.
    """

    def __init__(self, host: SharedHost) -> None:
        self._host = host
        self._channel: Channel | None = None
        self._sent: dict[int, _Sent] = {}
        self._last_number = 0
        self._outcomes: list[Outcome] = []
        self._deaths = 0

    def submit(self, lane: SharedLane, prepared: Block, costs: Any, tag: Any, weights: Any = None) -> None:
        self._last_number += 1
        places = np.arange(len(prepared))
        sent = _Sent(lane, prepared, costs, weights, tag, places, np.ones(len(prepared), bool))
        self._sent[self._last_number] = sent
        try:
            self._send(self._last_number)
        except (ConnectionClosed, UnknownLane) as error:
            self._begin_anew(error)

    def ready(self) -> list[Outcome]:
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def finish(self) -> Iterator[list[Outcome]]:
        while self._sent:
            try:
                outcomes, is_all = self._asked("more")
                self._take(outcomes)
                if is_all and self._sent:
                    raise RuntimeError("The model host says that it is done, and has not answered everything.")
            except (ConnectionClosed, UnknownLane) as error:
                self._begin_anew(error)
            if self._outcomes:
                yield self.ready()
        yield self.ready()

    def take_stats(self) -> dict[Any, list[BatchStats]]:
        """The last that is asked. Of what the host that lives now has done; what another one did is lost with it."""
        by_key = self._leave()
        # Another worker may have given examples of this one to a version that this one does not know: by its key then.
        return {self._host.lane(key) or key: stats for key, stats in by_key.items()}

    def close(self) -> None:
        """Leave; what is not yet computed is forgotten."""
        if self._sent and self._channel is not None:
            self._channel.close()  # The host sees it, and stops.
            self._channel = None
        self._leave()

    def _leave(self) -> dict[Any, list[BatchStats]]:
        channel, self._channel = self._channel, None
        if channel is None:
            return {}
        try:
            stats = request(channel, "close")
        except ConnectionClosed:
            channel.close()
            return {}
        self._host.give_back(channel)
        return stats

    def _send(self, number: int) -> None:
        """What has no outcome yet of this block."""
        sent = self._sent[number]
        sent.places = np.flatnonzero(sent.missing)
        prepared, weights = sent.prepared, sent.weights
        if len(sent.places) < len(sent.missing):
            prepared = take(prepared, sent.places)
            weights = None if weights is None else weights[sent.places]
        self._take(self._asked("submit", sent.lane.key, number, prepared, sent.costs[sent.places], weights))

    def _take(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            self._deaths = 0
            sent = self._sent[outcome.tag]
            places = sent.places[outcome.places]
            sent.missing[places] = False
            if not sent.missing.any():
                del self._sent[outcome.tag]
            self._outcomes.append(replace(outcome, tag=sent.tag, places=places))

    def _asked(self, name: str, *arguments: Any) -> Any:
        if self._channel is None:
            self._channel = self._host.channel()
        return request(self._channel, name, *arguments)

    def _begin_anew(self, error: Exception) -> None:
        """The host has died, or it is another one: whatever has no outcome is handed over once more."""
        while True:
            if self._channel is not None:
                self._channel.close()
                self._channel = None
            self._deaths += isinstance(error, ConnectionClosed)
            if self._deaths > MOST_DEATHS:
                raise self._host.died(self._deaths) from error
            try:
                self._host.revive()
                for number in list(self._sent):
                    self._send(number)
                return
            except (ConnectionClosed, UnknownLane) as again:
                error = again
