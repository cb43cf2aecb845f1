"""Tests that ``BatchElements`` emits a batch with its last element: a split then falls between two batches."""

from __future__ import annotations

from typing import Any

import pytest
from apache_beam.transforms import util
from apache_beam.transforms.window import IntervalWindow

from luminosity.engine.workers.harness import emit_full_batches_at_once

_GlobalBatching: Any = util._GlobalWindowsBatchingDoFn  # pyright: ignore[reportPrivateUsage]
_WindowedBatching: Any = util._WindowAwareBatchingDoFn  # pyright: ignore[reportPrivateUsage]
_Estimator: Any = util._BatchSizeEstimator  # pyright: ignore[reportPrivateUsage]


@pytest.fixture(autouse=True)
def _as_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (_GlobalBatching, _WindowedBatching):
        monkeypatch.setattr(step, "process", step.process)  # restored at the end
    emit_full_batches_at_once()


def _values(emitted: Any) -> list[Any]:
    return [each.value for each in emitted or ()]


def test_a_batch_is_emitted_with_its_last_element() -> None:
    step = _GlobalBatching(_Estimator(min_batch_size=3, max_batch_size=3), lambda _: 1)
    step.start_bundle()
    assert [_values(step.process(number)) for number in range(7)] == [[], [], [[0, 1, 2]], [], [], [[3, 4, 5]], []]
    assert _values(step.finish_bundle()) == [[6]]


def test_a_batch_of_a_window_is_emitted_with_its_last_element() -> None:
    step = _WindowedBatching(_Estimator(min_batch_size=2, max_batch_size=2), lambda _: 1)
    step.start_bundle()
    windows = [IntervalWindow(0, 10), IntervalWindow(10, 20)]
    emitted = [_values(step.process(number, windows[number % 2])) for number in range(5)]
    assert emitted == [[], [], [[0, 2]], [[1, 3]], []]
    assert _values(step.finish_bundle()) == [[4]]
