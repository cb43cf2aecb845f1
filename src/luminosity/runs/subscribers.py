"""How others get the events of a run: subscribers in its process, and followers in other processes.

No subscriber can hold up or break the run. A follower reads the run's record and journal.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from luminosity.errors import RecordError
from luminosity.events import Event, Snapshot, Subscriber, from_json, is_known
from luminosity.runs import records
from luminosity.runs.journal import NUMBER, Journal, path_beside
from luminosity.runs.records import FileVersion, Record, version_of

__all__ = ["EventStream", "Follower"]

_LOGGER = logging.getLogger(__name__)
_MOST_WAITING = 1000  # events for a slow subscriber; older ones are dropped
_END_TIMEOUT_S = 5.0  # for slow subscribers at the end of a run


class EventStream:
    """Delivers every event to every subscriber, in order, each on a thread of its own.

    A slow subscriber misses all but the newest of the snapshots that wait for it. A subscriber that raises gets no more
    events.
    """

    def __init__(self, subscribers: Iterable[Subscriber]) -> None:
        self._subscriptions = [_Subscription(subscriber) for subscriber in subscribers]

    @property
    def is_heard(self) -> bool:
        """True if there is any subscriber."""
        return bool(self._subscriptions)

    def emit(self, event: Event) -> None:
        """Queue ``event`` for every subscriber. Does not block."""
        for subscription in self._subscriptions:
            subscription.put(event)

    def close(self) -> None:
        """Wait until all events are delivered, but only for a few seconds."""
        deadline = time.monotonic() + _END_TIMEOUT_S
        for subscription in self._subscriptions:
            subscription.end()
        for subscription in self._subscriptions:
            subscription.join(deadline)


class _Subscription:
    def __init__(self, subscriber: Subscriber) -> None:
        self._subscriber = subscriber
        self._waiting: deque[Event] = deque()
        self._changed = threading.Condition()
        self._is_ending = False
        self._is_late = False
        self._thread = threading.Thread(target=self._serve, name="luminosity-events", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        with self._changed:
            if self._is_ending:
                return
            if isinstance(event, Snapshot) and self._waiting and isinstance(self._waiting[-1], Snapshot):
                self._waiting.pop()
            if len(self._waiting) >= _MOST_WAITING:
                self._waiting.popleft()
                self._is_late = True
            self._waiting.append(event)
            self._changed.notify()

    def end(self) -> None:
        with self._changed:
            self._is_ending = True
            self._changed.notify()

    def join(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            _LOGGER.warning("%r has not returned; the run ends without it", self._subscriber)
        elif self._is_late:
            _LOGGER.warning("%r was too slow: it did not get every event", self._subscriber)

    def _serve(self) -> None:
        while (event := self._next()) is not None:
            try:
                self._subscriber(event)
            except Exception:
                _LOGGER.warning("%r raised; it gets no more events", self._subscriber, exc_info=True)
                self.end()
                return

    def _next(self) -> Event | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_ending)
            return self._waiting.popleft() if self._waiting else None


class Follower:
    """Follows one run. Use it on one thread; call :meth:`close` at the end.

    The numbers of events are the same in every process that follows the run. To continue where another follower has
    ended, pass the number of its last event as ``after``.
    """

    def __init__(self, folder: Path, run_id: str, after: int = 0) -> None:
        self._path = records.path_of(folder, run_id)
        self._journal = Journal(path_beside(self._path))
        self._process: dict[str, Any] | None = None
        self._ended = ""
        self._seen: FileVersion | None = None  # what tells the version of the record that was read
        self.number = after  # of the last event that was returned
        self.has_missed = False  # whether events before those of the last call are left out in the record

    def record(self) -> Record:
        """Return the whole run so far. :meth:`news` then goes on after it. Raises :class:`RecordError`."""
        self._journal.close()
        content = self._contents(self._journal.read())
        self.number = content["number"]
        try:
            return records.record_of(content, self._path)
        except records.UNREADABLE as error:
            raise self._damaged(error) from error

    def news(self) -> list[tuple[int, Event]]:
        """Return the events after those that were returned before, with their numbers. Does not wait.

        If the record has taken up events that were not seen before, those that it keeps are returned, and
        ``has_missed`` is true if it has left some out. Raises :class:`RecordError` if the record can't be read.
        """
        events = self._journal.read()
        self.has_missed = False
        if self._is_behind(events):
            events = self._kept(events)
        found = [event for event in events if event[NUMBER] > self.number]
        if found:
            self.has_missed = len(found) < found[-1][NUMBER] - self.number
            self.number = found[-1][NUMBER]
        return [(event[NUMBER], self._event(event)) for event in found if is_known(event)]

    def state(self) -> str:
        """Return the state of the run as far as :meth:`record` and :meth:`news` have returned it; see ``Record.state``.

        Takes little time. Raises :class:`RecordError` if the record can't be read.
        """
        if self._ended:
            return self._ended
        process = self._process = self._process or self._read([])["process"]
        if records.is_alive(process, self._path):
            return "running"
        # The run may have written its end before its process ended.
        found = records.load(self._path, only_last=True)
        if isinstance(found, Record) and found.ended is not None:
            return "running"
        self._ended = "lost"
        return self._ended

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()

    def _is_behind(self, events: list[dict[str, Any]]) -> bool:
        """Return whether the record holds events that were not returned yet."""
        if self._journal.is_open:
            first = min((event[NUMBER] for event in events), default=self._journal.after + 1)
            return first > self.number + 1
        # The run has ended, or an older version, which has no journal, records it.
        return version_of(self._path) != self._seen

    def _kept(self, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the events of the record and ``events`` in order."""
        try:
            content = self._contents(events)
        except RecordError:
            self._journal.close()  # so that the next call reads the events again
            raise
        ended = [content["ended"]] if content["ended"] is not None else []
        kept = [content["started"], *content["happenings"], *content["snapshots"], *ended]
        return sorted(kept, key=lambda event: event[NUMBER])

    def _contents(self, events: list[dict[str, Any]]) -> dict[str, Any]:
        version = version_of(self._path)
        content = self._read(events)
        self._seen = version
        self._process = content["process"]
        self._ended = content["ended"]["state"] if content["ended"] is not None else ""
        return content

    def _read(self, events: list[dict[str, Any]]) -> dict[str, Any]:
        try:
            content = records.contents(self._path, events)
            _number(content)
        except FileNotFoundError as error:
            raise RecordError(f"no run is recorded in {self._path}") from error
        except records.UNREADABLE as error:
            raise self._damaged(error) from error
        return content

    def _damaged(self, error: Exception) -> RecordError:
        return RecordError(f"{self._path} is damaged: {records.damaged(self._path, error).reason}")

    def _event(self, data: dict[str, Any]) -> Event:
        if data["event"] == "RunEnded":
            self._ended = data["state"]
        return from_json(data)


def _number(content: dict[str, Any]) -> None:
    """Give numbers to the events of a record of an older version, which has none, in the order of their times."""
    if NUMBER in content["started"]:
        return
    ended = [content["ended"]] if content["ended"] is not None else []
    between = sorted([*content["happenings"], *content["snapshots"]], key=lambda event: event["seconds"])
    for number, event in enumerate([content["started"], *between, *ended], start=1):
        event[NUMBER] = number
        content["number"] = number
