"""The thread that writes checkpoints, while the loop goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable

from luminosity.engine.data.world import World
from luminosity.engine.durable.store import CheckpointFolder, Transaction

__all__ = ["CheckpointWriter"]

_SYNC_S = 1.0  # at most so much is lost with the power; finalization callbacks wait for it
_CLOSE_S = 60.0  # how long the end of a run waits for a slow disk


class CheckpointWriter:
    """Writes one checkpoint after the other, and syncs them in groups.

    ``on_written`` is called on the writer's thread with the number of the last checkpoint that is written, the number
    of the last one that would survive a power loss, and the error that ended the writing, if there is one. The loop's
    thread calls everything else.
    """

    def __init__(
        self, folder: CheckpointFolder, world: World, on_written: Callable[[int, int, Exception | None], None]
    ) -> None:
        self._folder = folder
        self._monotonic = world.clock.monotonic
        self._on_written = on_written
        self._changed = threading.Condition()
        self._next: Transaction | None = None
        self._is_writing = False
        self._is_closed = False
        self._is_urgent = False
        self._written = self._synced = 0
        self._error: Exception | None = None
        self._thread = world.start_thread(self._run, "luminosity-checkpoint")

    @property
    def is_busy(self) -> bool:
        """Whether the last checkpoint is still being written."""
        return self._next is not None or self._is_writing

    def submit(self, changes: Transaction) -> None:
        """Write a checkpoint. Call it only if the writer is not busy. Does not wait."""
        with self._changed:
            self._next = changes
            self._changed.notify_all()

    def wait_until_written(self) -> bool:
        """Wait until the writer is not busy, but not forever; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.is_busy or self._error is not None, _CLOSE_S)

    def finish(self) -> None:
        """Wait until everything is on the disk. Raises the error that ended the writing."""
        with self._changed:
            self._is_urgent = True
            self._changed.notify_all()
            is_done = self._changed.wait_for(
                lambda: self._error is not None or (not self.is_busy and self._synced == self._written), _CLOSE_S
            )
            self._is_urgent = False
        if self._error is not None:
            raise self._error
        if not is_done:
            raise TimeoutError(f"the checkpoint was not written within {_CLOSE_S:.0f} s: the disk is too slow")

    def close(self) -> None:
        """End the thread. What is not written yet is not written."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        synced_at = self._monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work, self._seconds_to_sync(synced_at))
                if self._is_closed:
                    return
                changes, self._next = self._next, None
                self._is_writing = changes is not None
            try:
                if changes is not None:
                    self._folder.write(changes)
                    self._written = changes.number
                is_due = self._is_urgent or self._monotonic() - synced_at >= _SYNC_S
                if self._written > self._synced and (is_due or self._folder.must_sync):
                    self._folder.sync()
                    synced_at = self._monotonic()
                    self._synced = self._written
                    self._folder.shrink()
                self._on_written(self._written, self._synced, None)
            except Exception as error:  # the loop ends the run with it
                self._error = error
                self._on_written(self._written, self._synced, error)
                return
            finally:
                with self._changed:
                    self._is_writing = False
                    self._changed.notify_all()

    def _has_work(self) -> bool:
        return self._is_closed or self._next is not None or (self._is_urgent and self._written > self._synced)

    def _seconds_to_sync(self, synced_at: float) -> float | None:
        if self._written == self._synced:
            return None
        return max(0.0, synced_at + _SYNC_S - self._monotonic())
