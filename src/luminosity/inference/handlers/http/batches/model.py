"""A model on a server that gets its requests in files: ``HttpModelHandler.chat(..., completion_window="24h")``."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from luminosity.errors import EndpointError, IncompleteAnswer, LuminosityError, RemoteModelError
from luminosity.inference.answer_cache import CacheSettings, open_cache
from luminosity.inference.handlers.http.batches.api import BatchApi, Line, line_of
from luminosity.inference.handlers.http.batches.journal import BatchJournal
from luminosity.inference.handlers.http.limits import Claim
from luminosity.inference.handlers.http.protocol import Request, Response
from luminosity.inference.handlers.http.remote_model import RemoteModel

__all__ = ["MOST_REQUESTS", "BatchAnswer", "BatchModel"]

_LOGGER = logging.getLogger(__name__)
MOST_REQUESTS = 10_000  # in one file; OpenAI's server takes 50,000
_MOST_BYTES = 100_000_000  # of one file; OpenAI's server takes 200 MB
_QUIET_S = 2.0  # a file is sent if no further request has come for this long
_LONGEST_WAIT_S = 30.0  # or if the first one has waited for this long
_FIRST_POLL_S = 2.0
_LONGEST_POLL_S = 60.0
_SLOWER = 1.5  # how much longer each pause between polls is
_GRACE_S = 3600.0  # after the window, until a batch counts as lost
_MOST_ATTEMPTS = 3  # for a request that failed in its batch and may succeed in another
_RETRIED = frozenset({0, 408, 429})  # and all from 500


@dataclass(frozen=True)
class BatchAnswer:
    """A server's answer to one request of a batch."""

    response: Response
    is_cached: bool = False
    attempts: int = 1


@dataclass(eq=False)
class _Item:
    key: bytes
    request: Request
    most_new: int
    future: Future[Any] = field(default_factory=Future[Any])
    claim: Claim | None = None
    attempts: int = 0


@dataclass(eq=False)
class _Open:
    """A batch that this process waits for."""

    began: float
    items: dict[bytes, list[_Item]] = field(default_factory=dict[bytes, list[_Item]])
    id: str | None = None
    pause_s: float = _FIRST_POLL_S
    due: float = 0.0


class BatchModel:
    """Collects requests, sends them in files and hands out the answers. Requests may come from any thread.

    A thread of its own sends and polls. What was sent is noted in the cache's folder: after a restart, the same
    requests wait for the same batch. Answers are in the cache before they are handed out.
    """

    def __init__(self, remote: RemoteModel, cache: CacheSettings, window: str, window_s: float, most: int) -> None:
        self._remote = remote
        self._cache = cache
        self._window = window
        self._window_s = window_s
        self._most = most
        self._api = BatchApi(remote.send, remote.once)
        self._journal = BatchJournal(cache.folder)
        self._changed = threading.Condition()
        self._new: list[_Item] = []
        self._first_at = self._last_at = 0.0
        self._open: dict[str, _Open] = {}
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="server-batches", daemon=True)
        self._thread.start()

    @property
    def capacity(self) -> int:
        """How many requests it takes at once: those of several files."""
        return 5 * self._most

    def submit(self, example: Any, inference_args: Mapping[str, Any] | None = None) -> Future[Any]:
        """Return the future answer to a prepared chat."""
        request, key, most_new = self._remote.asked_of(example, dict(inference_args or {}))
        item = _Item(key, request, most_new)
        self._add([item])
        return item.future

    def close(self) -> None:
        """Stop waiting. What was sent stays sent, and is found again."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(_LONGEST_WAIT_S)

    def _add(self, items: Sequence[_Item]) -> None:
        now = time.monotonic()
        with self._changed:
            if self._is_closed:
                for item in items:
                    item.future.cancel()
                return
            self._first_at = self._first_at if self._new else now
            self._last_at = now
            self._new += items
            self._changed.notify_all()

    # What the thread does.

    def _run(self) -> None:
        while (taken := self._next()) is not None:
            self._guarded(taken, lambda taken=taken: self._take(taken))
            for name, each in list(self._open.items()):
                if each.due <= time.monotonic():
                    items = [item for same in each.items.values() for item in same]
                    self._guarded(items, lambda name=name, each=each: self._poll(name, each))
        with self._changed:
            left = [
                *self._new,
                *(item for each in self._open.values() for some in each.items.values() for item in some),
            ]
        for item in left:
            item.future.cancel()
        self._journal.close()

    def _guarded(self, items: Sequence[_Item], act: Callable[[], None]) -> None:
        """Act; an error fails the requests that it is about."""
        try:
            act()
        except Exception as error:
            if not isinstance(error, LuminosityError):
                _LOGGER.exception("Batches of a server have failed")
            for item in items:
                _fail(item, error)
            for name, each in list(self._open.items()):
                if all(item.future.done() for some in each.items.values() for item in some):
                    del self._open[name]

    def _next(self) -> list[_Item] | None:
        """Wait until requests are to be sent or a batch is to be asked about; return the requests, None at the end."""
        with self._changed:
            while not self._is_closed:
                now = time.monotonic()
                dues = [each.due for each in self._open.values()]
                if self._new:
                    ready = min(self._last_at + _QUIET_S, self._first_at + _LONGEST_WAIT_S)
                    if len(self._new) >= self._most or now >= ready:
                        taken, self._new = self._new[: self._most], self._new[self._most :]
                        return [item for item in taken if not item.future.cancelled()]
                    dues.append(ready)
                if any(due <= now for due in dues):
                    return []
                self._changed.wait(min(dues) - now if dues else None)
            return None

    def _take(self, items: Sequence[_Item]) -> None:
        """Answer requests from the cache, let others wait for the batches that have them, and send the rest."""
        if not items:
            return
        cache = open_cache(self._cache)
        known = cache.get(list({item.key for item in items}))
        for item in items:
            if item.key in known:
                _answer(item, BatchAnswer(self._response(item, known[item.key]), is_cached=True))
        left: dict[bytes, list[_Item]] = {}
        for item in items:
            if item.key not in known:
                left.setdefault(item.key, []).append(item)
        while left:
            part = self._part(left)
            roomy = [key for key, same in part.items() if self._has_room(same)]
            begun = self._journal.begin(roomy)
            for key, name in begun.others.items():
                self._settle(part[key][0], None)
                noted = self._journal.find(name)
                batch = self._open.setdefault(name, _Open(noted.began if noted else time.time()))
                batch.items.setdefault(key, []).extend(part[key])
            if begun.new:
                self._send(begun.name, {key: part[key] for key in begun.new})
            for key in part:
                del left[key]

    def _part(self, left: Mapping[bytes, list[_Item]]) -> dict[bytes, list[_Item]]:
        """Return as many requests as one file may have."""
        part: dict[bytes, list[_Item]] = {}
        size = 0
        for key, same in left.items():
            size += len(same[0].request.body or b"") + 200
            if part and size > _MOST_BYTES:
                break
            part[key] = same
        return part

    def _send(self, name: str, sent: dict[bytes, list[_Item]]) -> None:
        first = next(iter(sent.values()))[0].request
        batch = _Open(time.time(), sent)
        lines = [line_of(key, same[0].request.path, same[0].request.body or b"") for key, same in sent.items()]
        is_uploaded = False
        try:
            file_id = self._api.upload(b"".join(lines))
            is_uploaded = True
            batch.id = self._api.make(name, file_id, first.path, self._window)
        except Exception:
            for same in sent.values():
                self._settle(same[0], None)
            if not is_uploaded:  # otherwise the server may have made the batch: whoever asks again looks for it
                self._journal.end(name)
            raise
        self._journal.sent(name, batch.id)
        for same in sent.values():
            same[0].attempts += 1
        batch.due = time.monotonic() + batch.pause_s
        self._open[name] = batch
        _LOGGER.info("%d requests are sent as the batch %s.", len(sent), batch.id)

    def _has_room(self, same: list[_Item]) -> bool:
        """Reserve what a request may take from the budget; it fails, or comes later, if there is no room."""
        item = same[0]
        try:
            claim = self._remote.claim(item.request, item.most_new, self._window_s)
        except LuminosityError as error:
            for each in same:
                _fail(each, error)
            return False
        if not isinstance(claim, Claim):
            self._add(same)
            return False
        item.claim = claim
        return True

    def _poll(self, name: str, batch: _Open) -> None:
        if batch.id is None and not self._found(name, batch):
            return
        assert batch.id is not None
        try:
            state = self._api.state(batch.id)
        except EndpointError as error:
            if error.may_pass:
                self._wait(batch, error)
                return
            self._again(name, batch)  # the server does not know it any more
            return
        except RemoteModelError as error:
            self._wait(batch, error)
            return
        if not state.is_done:
            self._wait(batch, None)
            return
        lines = {line.key: line for file in state.files for line in self._api.lines(file)}
        if not lines and state.status == "failed":
            self._journal.end(name)
            raise RemoteModelError(f"{self._remote.shown} refused the batch {batch.id}: {state.reason or 'no reason'}")
        self._keep(lines)
        del self._open[name]
        self._journal.end(name)
        for key, same in batch.items.items():
            self._hand_out(same, lines.get(key) or Line(key, 0, b"", f"the batch has {state.status} without an answer"))

    def _found(self, name: str, batch: _Open) -> bool:
        """Find the server's name of a batch that another process has begun."""
        noted = self._journal.find(name)
        if noted is None:  # its answers are in the cache, or it is to be sent again
            self._again(name, batch, forget=False)
            return False
        batch.id = noted.id
        if batch.id is None:
            batch.id = self._api.find(name)
            if batch.id is not None:
                self._journal.sent(name, batch.id)
            elif time.time() - noted.began > _LONGEST_WAIT_S:  # its process has ended before it was sent
                self._again(name, batch)
            else:
                batch.due = time.monotonic() + _FIRST_POLL_S
        return batch.id is not None

    def _again(self, name: str, batch: _Open, forget: bool = True) -> None:
        """Let the requests of a batch go with another one."""
        if forget:
            self._journal.end(name)
        del self._open[name]
        for same in batch.items.values():
            self._settle(same[0], None)
            self._add(same)

    def _wait(self, batch: _Open, error: LuminosityError | None) -> None:
        if time.time() - batch.began > self._window_s + _GRACE_S:
            why = f": {error}" if error else ""
            raise RemoteModelError(f"the batch {batch.id} has not ended within {self._window}{why}", may_pass=True)
        batch.pause_s = min(_LONGEST_POLL_S, batch.pause_s * _SLOWER)
        batch.due = time.monotonic() + batch.pause_s

    def _keep(self, lines: Mapping[bytes, Line]) -> None:
        """Put the answers into the cache, also those that nobody waits for in this process."""
        kept: dict[bytes, bytes] = {}
        for key, line in lines.items():
            if 200 <= line.status < 300 and self._may_keep(line):
                kept[key] = line.body
        open_cache(self._cache).put(kept)

    def _may_keep(self, line: Line) -> bool:
        try:
            return not self._remote.read(Response(line.status, {}, line.body, self._remote.shown)).may_pass
        except IncompleteAnswer as error:
            return not error.may_pass
        except RemoteModelError:
            return False

    def _hand_out(self, same: list[_Item], line: Line) -> None:
        item = same[0]
        response = self._response(item, line.body, line.status or 503)
        self._settle(item, response if 200 <= line.status < 300 else None)
        may_pass = line.status in _RETRIED or line.status >= 500
        if may_pass and item.attempts < _MOST_ATTEMPTS:
            self._add(same)
            return
        for place, each in enumerate(same):
            if line.status:
                _answer(each, BatchAnswer(response, is_cached=place > 0, attempts=max(1, item.attempts)))
            else:
                _fail(each, RemoteModelError(f"{self._remote.shown} gave no answer: {line.reason}", may_pass=True))

    def _settle(self, item: _Item, response: Response | None) -> None:
        claim, item.claim = item.claim, None
        if claim is None:
            return
        if response is None:
            claim.took_nothing()
        else:
            claim.took(self._remote.usage(response))

    def _response(self, item: _Item, body: bytes, status: int = 200) -> Response:
        return Response(status, {}, body, self._remote.shown, request=item.request)


def _answer(item: _Item, answer: BatchAnswer) -> None:
    if item.future.set_running_or_notify_cancel():
        item.future.set_result(answer)


def _fail(item: _Item, error: Exception) -> None:
    with contextlib.suppress(Exception):
        if not item.future.done() and item.future.set_running_or_notify_cancel():
            item.future.set_exception(error)
