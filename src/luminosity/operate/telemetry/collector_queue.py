"""Sends spans and metrics to a collector on a thread of its own. A collector that is down holds nobody up."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from luminosity.runs.manifest.masking import mask_text

__all__ = ["CollectorQueue", "LibraryExporter"]

_LOGGER = logging.getLogger(__name__)

_MOST_WAITING = 4096  # spans; with all their attributes and events some 10 MB
_BATCH = 512  # spans in one request
_END_S = 3.0  # for what is left at the end of a run: less than the run waits for its subscribers
_OF_EXPORTERS = "opentelemetry.exporter"


class LibraryExporter(Protocol):
    """An exporter of OpenTelemetry, for spans or for metrics."""

    def export(self, batch: Any, /) -> Any:
        """Send. Returns a result whose name is SUCCESS or FAILURE. Blocks, within the exporter's timeout."""
        ...

    def shutdown(self) -> None:
        """Give up what is being sent."""
        ...


class CollectorQueue:
    """Keeps spans until they are sent, and asks for metrics when it is time to send some.

    ``add`` never waits, ``close`` waits a few seconds at most. All are thread-safe. The first sending
    that fails is logged as a warning; the library's own messages about it are not.
    """

    def __init__(
        self,
        spans: LibraryExporter | None,
        metrics: LibraryExporter | None,
        collect: Callable[[], Any],
        *,
        spans_every_s: float,
        metrics_every_s: float,
        place: str,
    ) -> None:
        """Make a queue, which keeps what it gets and sends nothing before it is started.

        ``collect`` returns the metrics to be sent now, or None if there are none; the queue calls it on its thread.
        ``place`` names the collector in the warning.
        """
        self._spans = spans
        self._metrics = metrics
        self._collect = collect
        self._spans_every_s = spans_every_s
        self._metrics_every_s = metrics_every_s
        self._place = place
        self._waiting: deque[Any] = deque()
        self._changed = threading.Condition()
        self._is_closing = False
        self._has_warned = False
        self._reason = ""  # what the exporter's library has logged first about what is being sent
        self.left_out = 0  # spans that were not sent: the collector was down, or too slow
        self._thread = threading.Thread(target=self._serve, name="luminosity-telemetry", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, span: Any) -> None:
        """Keep a span that has ended until it is sent. The oldest one is dropped if there are too many."""
        with self._changed:
            if self._spans is None or self._is_closing:
                return
            if len(self._waiting) >= _MOST_WAITING:
                self._waiting.popleft()
                self.left_out += 1
            self._waiting.append(span)
            if len(self._waiting) == _BATCH:
                self._changed.notify()

    def close(self) -> None:
        """Send what is left, for a few seconds at most."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(_END_S)
        if self._thread.is_alive():
            self._warn(f"it did not take everything within {_END_S:g} seconds")
        for exporter in (self._spans, self._metrics):
            if exporter is not None:
                exporter.shutdown()
        if self.left_out:
            _LOGGER.info("%d spans of the run were not sent", self.left_out)

    def _serve(self) -> None:
        with self._library_silenced():
            now = time.monotonic()
            spans_at, metrics_at = now + self._spans_every_s, now + self._metrics_every_s
            while True:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._is_closing or len(self._waiting) >= _BATCH,
                        max(0.0, min(spans_at, metrics_at) - time.monotonic()),
                    )
                    is_last, is_full = self._is_closing, len(self._waiting) >= _BATCH
                now = time.monotonic()
                is_up = True
                if is_last or is_full or now >= spans_at:
                    is_up = self._send_spans()
                    spans_at = time.monotonic() + self._spans_every_s
                if is_last or now >= metrics_at:
                    # A collector that took no spans a moment ago would only make the end of the run wait.
                    if is_up or not is_last:
                        self._send_metrics()
                    metrics_at = time.monotonic() + self._metrics_every_s
                if is_last:
                    return

    def _send_spans(self) -> bool:
        """Send the spans that wait. Returns whether the collector took them."""
        while self._spans is not None:
            with self._changed:
                batch = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
            if not batch:
                break
            if not self._send(self._spans, batch):
                with self._changed:
                    self.left_out += len(batch)
                    if self._is_closing:
                        self.left_out += len(self._waiting)
                        self._waiting.clear()
                return False
        return True

    def _send_metrics(self) -> None:
        if self._metrics is not None and (found := self._collect()) is not None:
            self._send(self._metrics, found)

    def _send(self, exporter: LibraryExporter, batch: Sequence[Any] | Any) -> bool:
        self._reason = ""
        try:
            is_sent = exporter.export(batch).name == "SUCCESS"
        except Exception as error:  # of the library; the run must go on
            self._reason, is_sent = f"{type(error).__name__}: {error}", False
        if not is_sent:
            self._warn(self._reason or "it took nothing")
        return is_sent

    def _warn(self, reason: str) -> None:
        with self._changed:
            if self._has_warned:
                return
            self._has_warned = True
        _LOGGER.warning(
            "traces or metrics of the run can't be sent to %s, and are left out while that lasts: %s; check "
            "OTEL_EXPORTER_OTLP_ENDPOINT, or leave out --telemetry",
            mask_text(self._place),
            mask_text(reason),
        )

    def _library_silenced(self) -> contextlib.ExitStack:
        """Keep the library's messages of this thread from being logged: it logs every attempt."""
        thread = threading.get_ident()

        def is_of_others(record: logging.LogRecord) -> bool:
            if record.thread != thread:
                return True
            if not self._reason:  # the messages about further attempts say less
                self._reason = record.getMessage().removeprefix("Transient error ").partition(" encountered while ")[0]
            return False

        stack = contextlib.ExitStack()
        for name in [each for each in logging.root.manager.loggerDict if each.startswith(_OF_EXPORTERS)]:
            logger = logging.getLogger(name)
            logger.addFilter(is_of_others)
            stack.callback(logger.removeFilter, is_of_others)
        return stack
