"""Server-sent events: what happens in a run, while it happens."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Generator, MutableMapping
from typing import Any

from luminosity.errors import RecordError
from luminosity.events import Event, to_json
from luminosity.operate.page.replies import json_bytes
from luminosity.operate.page.run_data import Run, RunFiles
from luminosity.runs.subscribers import Follower

__all__ = ["EventStream", "Streams"]

_POLL_S = 1.0  # runs write their events once a second
_COST_S = 5.0  # between two bills
_MOST_SHARE = 0.005  # of a core, for the bills of a run whose record is large
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

    @contextlib.contextmanager
    def opened(self) -> Generator[None]:
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
        if seconds and not self._is_stopped:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), seconds)
        return self._is_stopped


class EventStream:
    """The reply to one client: events of a run after number ``after``, until the run has ended."""

    def __init__(self, streams: Streams, files: RunFiles, run_id: str, after: int) -> None:
        self._streams = streams
        self._files = files
        self._run_id = run_id
        self._after = after

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the events, as ASGI's applications do. One task waits for the client to go."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        with self._streams.opened():
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

        parts = _Parts(self._files, self._run_id, self._after)
        try:
            await push(b"retry: %d\n\n" % _RETRY_MS)
            is_last = False
            while not parts.is_over and not is_last:
                is_last = await self._streams.wait(_POLL_S if parts.is_begun else 0.0)  # a stop brings the last news
                body = await asyncio.to_thread(parts.next)
                if body:
                    await push(body)
            await push(b"", more=False)
        except asyncio.TimeoutError:
            return  # the client takes nothing; the server closes a connection whose reply is not complete
        finally:
            parts.close()


class _Parts:
    """What a client of one run is sent: a part about once a second. Nothing is kept for a client that does not read."""

    def __init__(self, files: RunFiles, run_id: str, after: int) -> None:
        self._files = files
        self._run_id = run_id
        self._after = after
        self._follower = Follower(files.folder, run_id, after)
        self.is_begun = False
        self._state = ""
        self._cost: Any = None
        self._sent_at = time.monotonic()
        self._cost_at = self._sent_at + _POLL_S  # that of a run that has just started grows fast
        self.is_over = False

    def next(self) -> bytes:
        """Return the next part, which is empty if there is nothing to say."""
        now = time.monotonic()
        try:
            body = self._news() + self._changes(now)
        except RecordError:
            self.is_over = True  # the record was removed; a client that connects again is told so
            return _named("reload", {})
        if not body and now - self._sent_at >= _HEARTBEAT_S:
            body = b": the run goes on\n\n"
        if body:
            self._sent_at = now
        return body

    def close(self) -> None:
        """Close the files."""
        self._follower.close()

    def _news(self) -> bytes:
        if not self.is_begun:
            self.is_begun = True
            whole = self._files.run(self._run_id)
            if isinstance(whole, Run) and whole.number < self._after:
                self._follower.number = whole.number  # the numbers are of another journal
                return _named("reload", {})
        news = self._follower.news()
        if self._follower.has_missed:
            return _named("reload", {})
        body = b"".join(_event(number, event) for number, event in news)
        return body if len(body) <= _MOST_BYTES else _named("reload", {})

    def _changes(self, now: float) -> bytes:
        """Return what is not an event of the run: its state and its cost."""
        body = b""
        state = self._follower.state()
        if state != self._state:
            self._state = state
            body += _named("state", {"state": state})
        self.is_over = state != "running"
        if self.is_over or now >= self._cost_at:
            cost = self._files.bill(self._run_id)
            took = time.monotonic() - now
            self._cost_at = now + max(_COST_S, took / _MOST_SHARE)
            if cost is not None and cost != self._cost:
                self._cost = cost
                body += _named("cost", cost)
        return body


def _event(number: int, event: Event) -> bytes:
    return b"id: %d\ndata: %s\n\n" % (number, json_bytes(to_json(event)))


def _named(name: str, data: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), json_bytes(data))


async def _gone(receive: Callable[[], Awaitable[MutableMapping[str, Any]]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
