"""What the loop tells of itself: what happens, when it happens, and how it stands, now and then."""

from __future__ import annotations

import os
import secrets
import sys
import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Literal

from luminosity.engine.loop.bundle import Bundle
from luminosity.engine.monitor.subscribers import EventStream
from luminosity.engine.observe.snapshots import Snapshots
from luminosity.engine.workers.failure import Failure
from luminosity.events import BundleRetried, RunEnded, RunStarted, WorkerLost, WorkerStarted

if TYPE_CHECKING:
    from luminosity.engine.loop.workers import Worker

_SNAPSHOT_EVERY_S = 0.2
_LINE_CHARACTERS = 300


class Reporter:
    """Called by the loop, on its thread; costs it next to nothing between snapshots."""

    def __init__(self, snapshots: Snapshots, stream: EventStream, queue_limit: int, memory_limit: int) -> None:
        self._snapshots = snapshots
        self._stream = stream
        self._began_at = self._next_at = time.monotonic()
        now = datetime.now(timezone.utc)
        # Sorts by time; the random part tells apart those of the same second.
        self.run_id = f"{now:%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"
        stream.emit(
            RunStarted(
                self.run_id,
                0.0,
                name=_script_name(),
                started_at=round(now.timestamp(), 3),
                stages=snapshots.stages(),
                pools=snapshots.pools(),
                queue_limit=queue_limit,
                memory_limit=memory_limit,
            )
        )

    def tick(self) -> None:
        now = time.monotonic()
        if now >= self._next_at and self._stream.is_heard:
            self._next_at = now + _SNAPSHOT_EVERY_S
            self._stream.emit(self._snapshots.take(self.run_id, now - self._began_at))

    def worker_started(self, worker: Worker) -> None:
        share = worker.pool.plan.share(worker.index)
        pid = worker.process.pid if worker.process is not None else 0
        self._stream.emit(WorkerStarted(self.run_id, self._seconds(), worker.id, share.pool, pid, share.devices))

    def worker_lost(self, worker: Worker, reason: str) -> None:
        pool = worker.pool.plan.name
        self._stream.emit(WorkerLost(self.run_id, self._seconds(), worker.id, pool, reason, len(worker.bundles)))

    def bundle_retried(self, bundle: Bundle, failure: Failure) -> None:
        step = failure.step or bundle.stage.plan.label
        line = one_line(failure.exception)
        self._stream.emit(BundleRetried(self.run_id, self._seconds(), step, line, bundle.failures, bundle.count))

    def ended(self, state: Literal["done", "failed", "cancelled"], failure: str) -> None:
        """Say so, and wait until all have heard of it."""
        seconds = self._seconds()
        last = self._snapshots.take(self.run_id, seconds)
        self._stream.emit(RunEnded(self.run_id, seconds, state, last, one_line(failure)))
        self._stream.close()

    def _seconds(self) -> float:
        return round(time.monotonic() - self._began_at, 3)


def one_line(text: str) -> str:
    """
    >>> one_line("ValueError: no\\n  more of it")
    'ValueError: no'
    """
    line = text.strip().partition("\n")[0]
    return line if len(line) <= _LINE_CHARACTERS else line[: _LINE_CHARACTERS - 1] + "…"


def _script_name() -> str:
    name = os.path.basename(sys.argv[0]) if sys.argv else ""
    return name if name not in ("", "-c") else "python"
