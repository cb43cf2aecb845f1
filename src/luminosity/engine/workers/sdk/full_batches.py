"""Lets Beam's ``BatchElements`` emit a batch with its last element, so that a split leaves whole batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from apache_beam import DoFn
from apache_beam.transforms import util
from apache_beam.transforms.window import GlobalWindows
from apache_beam.utils.windowed_value import WindowedValue

__all__ = ["emit_full_batches_at_once"]

_GlobalBatching: Any = util._GlobalWindowsBatchingDoFn  # pyright: ignore[reportPrivateUsage]
_WindowedBatching: Any = util._WindowAwareBatchingDoFn  # pyright: ignore[reportPrivateUsage]


def emit_full_batches_at_once() -> None:
    """Change the two DoFns of ``BatchElements`` in this process.

    Beam's own keep a full batch until the next element arrives. That element then belongs to the bundle: if the bundle
    is split while the batch is computed, the element is left over and makes a batch of one. The batches themselves are
    the same.
    """
    _GlobalBatching.process = _with_full_batch(_GlobalBatching.process)
    _WindowedBatching.process = _with_full_batch_of_window(_WindowedBatching.process)


def _with_full_batch(original: Any) -> Any:
    def process(self: Any, element: Any) -> Iterator[Any]:
        yield from original(self, element)
        if self._running_batch_size >= self._target_batch_size:
            with self._batch_size_estimator.record_time(self._running_batch_size):
                yield GlobalWindows.windowed_value_at_end_of_window(self._batch)
            self._batch = []
            self._running_batch_size = 0
            self._target_batch_size = self._batch_size_estimator.next_batch_size()

    return process


def _with_full_batch_of_window(original: Any) -> Any:
    def process(self: Any, element: Any, window: Any = DoFn.WindowParam) -> Iterator[Any]:
        yield from original(self, element, window)
        batch = self._batches.get(window)
        if batch is not None and batch.size >= self._target_batch_size:
            with self._batch_size_estimator.record_time(batch.size):
                yield WindowedValue(batch.elements, window.max_timestamp(), (window,))
            del self._batches[window]
            self._target_batch_size = self._batch_size_estimator.next_batch_size()

    return process
