"""Tests of the ``PipelineResult``: state, waiting, cancelling, metrics."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.metrics import Metrics, MetricsFilter
from apache_beam.runners.runner import PipelineResult, PipelineState

from luminosity.errors import RunCancelled, StepFailed
from tests.marks import first_time, note, wait_for_file
from tests.processes import wait_for, workers_of
from tests.runners import IS_REFERENCE, collect_all, new_pipeline, start

pytestmark = [
    pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does"),
    pytest.mark.usefixtures("leaves_nothing"),
]


@contextlib.contextmanager
def held_run(tmp_path: Path) -> Iterator[tuple[PipelineResult, Callable[[], None]]]:
    """Start a run that waits. Returns its result and a function that releases it."""
    started, release = tmp_path / "started", tmp_path / "release"

    def hold(x: int) -> int:
        note(started)
        wait_for_file(release)
        return x

    result = start(lambda p: p | beam.Create([1]) | beam.Map(hold), "--cpu_workers=2")
    try:
        assert wait_for(started.exists, timeout_s=60)
        yield result, release.touch
    finally:
        release.touch()
        with contextlib.suppress(RunCancelled):
            result.wait_until_finish(duration=60_000)


def test_run_returns_at_once_and_ends_done(tmp_path: Path) -> None:
    with held_run(tmp_path) as (result, release):
        assert result.state == PipelineState.RUNNING
        release()
        assert result.wait_until_finish() == PipelineState.DONE
        assert result.state == PipelineState.DONE
        assert result.wait_until_finish() == PipelineState.DONE


def test_a_wait_that_is_too_short_returns_none(tmp_path: Path) -> None:
    with held_run(tmp_path) as (result, _):
        assert result.wait_until_finish(duration=100) is None
        assert result.state == PipelineState.RUNNING


def test_cancel_ends_the_run(tmp_path: Path) -> None:
    with held_run(tmp_path) as (result, _):
        result.cancel()
        with contextlib.suppress(RunCancelled):
            result.wait_until_finish(duration=60_000)
        assert result.state == PipelineState.CANCELLED
        assert wait_for(lambda: not workers_of(os.getpid()), timeout_s=60)


def test_cancel_after_the_end_changes_nothing(tmp_path: Path) -> None:
    with held_run(tmp_path) as (result, release):
        release()
        result.wait_until_finish()
        result.cancel()
        assert result.state == PipelineState.DONE


def test_a_failed_run_says_so_each_time_it_is_asked() -> None:
    result = start(lambda p: p | beam.Create([1]) | beam.Map(lambda x: 1 / 0), "--cpu_workers=1")
    for _ in range(2):
        with pytest.raises(StepFailed, match="ZeroDivisionError"):
            result.wait_until_finish(duration=60_000)
        assert result.state == PipelineState.FAILED


def test_metrics_count_each_element_once_though_bundles_are_tried_again(tmp_path: Path) -> None:
    count = 200
    failed, died = tmp_path / "failed", tmp_path / "died"

    def counted(x: int) -> int:
        Metrics.counter("test", "seen").inc()
        Metrics.distribution("test", "values").update(x)
        if x % 50 == 49:
            if first_time(failed):
                raise ValueError("once")
            if first_time(died):
                os._exit(3)
        return x

    def build(pipeline: beam.Pipeline) -> dict[str, beam.PCollection]:
        return {"elements": pipeline | beam.Create(range(count)) | beam.Reshuffle() | beam.Map(counted)}

    _, result = collect_all(build, tmp_path, new_pipeline("--cpu_workers=2"))
    assert failed.exists()
    assert died.exists()
    found = result.metrics().query(MetricsFilter().with_namespace("test"))
    assert [metric.committed for metric in found["counters"]] == [count]
    assert [metric.committed.count for metric in found["distributions"]] == [count]
    assert [metric.committed.sum for metric in found["distributions"]] == [sum(range(count))]
