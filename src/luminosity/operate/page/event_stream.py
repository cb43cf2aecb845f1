"""Server-sent events: what happens in a run, while it happens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from luminosity.engine.monitor import records
from luminosity.engine.monitor.records import Damaged, Record
from luminosity.events import Event, to_json
from luminosity.operate.page.replies import json_bytes
from luminosity.operate.page.run_data import number_of

__all__ = ["EventStream", "Streams", "is_over"]

_POLL_S = 1.0  # runs write their events once a second
_HEARTBEAT_S = 15.0  # a connection that is gone is noticed by then
_SEND_S = 30.0  # a client that takes nothing for so long is let go; it may come back and resume
_MOST_BYTES = 4_000_000  # of events at once; a client that lags further behind reads the whole run again
_RETRY_MS = 1000


class Streams:
    """All connections that wait for events: their number is limited, and they end when the server stops."""

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._open = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._is_stopped = False

    @property
    def is_full(self) -> bool:
        """Whether no further connection is accepted."""
        return self._open >= self._most

    def stop(self) -> None:
        """End all connections. May be called on any thread and in a signal's handler."""
        self._is_stopped = True
        if self._loop is not None and self._stopping is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncGenerator[None]:
        """Count a connection."""
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    async def wait(self, seconds: float) -> bool:
        """Wait for so many seconds, or until the server stops; return whether it does."""
        if self._stopping is None:
            self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        if not self._is_stopped:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), seconds)
        return self._is_stopped


class EventStream:
    """The reply to one client: events of a run after number ``after``, until the run has ended."""

    def __init__(self, streams: Streams, folder: Path, run_id: str, after: int) -> None:
        self._streams = streams
        self._source = _Source(folder, run_id)
        self._after = after

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the events, as ASGI's applications do. One task waits for the client to go."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        async with self._streams.opened():
            gone = asyncio.ensure_future(_gone(receive))
            sending = asyncio.ensure_future(self._send_all(send))
            try:
                await asyncio.wait((gone, sending), return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    sending.result()
            finally:
                for task in (gone, sending):
                    task.cancel()
                await asyncio.gather(gone, sending, return_exceptions=True)

    async def _send_all(self, send: Callable[[MutableMapping[str, Any]], Awaitable[None]]) -> None:
        async def push(body: bytes, more: bool = True) -> None:
            message = {"type": "http.response.body", "body": body, "more_body": more}
            await asyncio.wait_for(send(message), _SEND_S)

        try:
            await push(b"retry: %d\n\n" % _RETRY_MS)
            quiet = 0.0
            state = ""
            while True:
                news, now = await asyncio.to_thread(self._source.news, self._after)
                body = b"".join(_event(number, event) for number, event in news)
                if len(body) > _MOST_BYTES:
                    body = _named("reload", {})
                if news:
                    self._after = news[-1][0]
                if now != state:
                    state = now
                    body += _named("state", {"state": state})
                if not body and quiet >= _HEARTBEAT_S:
                    body = b": still here\n\n"
                if body:
                    await push(body)
                    quiet = 0.0
                if state != "running" or await self._streams.wait(_POLL_S):
                    break
                quiet += _POLL_S
            await push(b"", more=False)
        except asyncio.TimeoutError:
            return  # The server closes the connection of a reply that was not completed.


class _Source:
    """The events of one run, as far as its record holds them."""

    def __init__(self, folder: Path, run_id: str) -> None:
        self._path = records.path_of(folder, run_id)

    def news(self, after: int) -> tuple[list[tuple[int, Event]], str]:
        """Return the events after number ``after``, and the state of the run."""
        record = records.load(self._path)
        if isinstance(record, Damaged):
            return [], "damaged"
        events = [*record.happenings, *record.snapshots, *([record.ended] if record.ended is not None else [])]
        numbered = sorted(((int(1000 * event.seconds), event) for event in events), key=lambda each: each[0])
        return [each for each in numbered if each[0] > after], record.state

    def is_over(self, after: int) -> bool:
        """Return whether there is nothing to wait for: the run has ended, and the client has all of it."""
        record = records.load(self._path)
        return isinstance(record, Record) and record.state != "running" and number_of(record) <= after


def is_over(folder: Path, run_id: str, after: int) -> bool:
    """Return whether a client that has the events up to ``after`` has all that will ever come."""
    return _Source(folder, run_id).is_over(after)


def _event(number: int, event: Event) -> bytes:
    return b"id: %d\ndata: %s\n\n" % (number, json_bytes(to_json(event)))


def _named(name: str, data: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), json_bytes(data))


async def _gone(receive: Callable[[], Awaitable[MutableMapping[str, Any]]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
