"""Tests of dry runs: a script's pipelines are planned, whatever their runner, and nothing runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import apache_beam as beam
import psutil
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.runners.runner import PipelineState
from apache_beam.testing import test_pipeline

from luminosity import LuminosityRunner
from luminosity.engine.explain.dryrun import DryRunner, dry_runs
from luminosity.engine.explain.explain import explain
from luminosity.errors import OptionError, UnsupportedPipeline
from tests.dofns import Numbers
from tests.marks import note
from tests.processes import files_of
from tests.runners import IS_REFERENCE

pytestmark = [pytest.mark.skipif(IS_REFERENCE, reason="what runs nothing runs on no runner")]


@pytest.mark.parametrize(
    ("runner", "other"),
    [
        (lambda: None, ""),
        (lambda: "luminosity.LuminosityRunner", ""),
        (LuminosityRunner, ""),
        (lambda: "DirectRunner", "DirectRunner"),
        (lambda: "DataflowRunner", "DataflowRunner"),  # not even installed
        (FnApiRunner, "FnApiRunner"),
    ],
)
def test_nothing_runs_on_whichever_runner(tmp_path: Path, runner: Any, other: str) -> None:
    processes, files = psutil.Process().children(recursive=True), files_of(os.getpid())
    options = PipelineOptions(["--runner=luminosity.LuminosityRunner"])
    with dry_runs() as runs, beam.Pipeline(runner=runner(), options=options) as pipeline:
        _ = pipeline | beam.Create([1]) | beam.Map(lambda x: note(tmp_path / "ran", x))
    assert [one.other_runner for one in runs] == [other]
    assert os.listdir(tmp_path) == []
    assert set(psutil.Process().children(recursive=True)) <= set(processes)  # what ends meanwhile is that of others
    assert files_of(os.getpid()) <= files


def test_a_runner_may_be_named_in_many_ways() -> None:
    with dry_runs() as runs:
        for pipeline in (
            beam.Pipeline(argv=["--runner=FlinkRunner"]),
            beam.Pipeline(options=PipelineOptions(runner="SparkRunner")),
            beam.Pipeline("PrismRunner"),
            test_pipeline.TestPipeline(runner="DirectRunner"),
        ):
            _ = pipeline | beam.Create([1])
            pipeline.run()
        LuminosityRunner().run(beam.Create([1]))
    assert [one.other_runner for one in runs] == ["FlinkRunner", "SparkRunner", "PrismRunner", "DirectRunner", ""]


def test_the_result_is_that_of_a_run_which_is_over() -> None:
    with dry_runs():
        pipeline = beam.Pipeline()
        _ = pipeline | beam.Create([1])
        result: Any = pipeline.run()
    assert result.state == result.wait_until_finish() == result.wait_until_finish(duration=1) == PipelineState.DONE
    assert result.cancel() == PipelineState.DONE
    assert list(result.monitoring_infos()) == []
    assert result.metrics().query()["counters"] == result.monitoring_metrics().query()["counters"] == []


def test_what_a_run_would_refuse_is_refused() -> None:
    with dry_runs() as runs:
        pipeline = beam.Pipeline(options=PipelineOptions(["--cpu_workers=many"]))
        with pytest.raises(OptionError, match="--cpu_workers=many"):
            pipeline.run()
        pipeline = beam.Pipeline()
        everything = pipeline | "All" >> beam.Create([1])
        minutes = pipeline | "Minutes" >> beam.Create([2]) | beam.WindowInto(beam.window.FixedWindows(60))
        _ = (everything, minutes) | "Both" >> beam.Flatten()
        with pytest.raises(UnsupportedPipeline, match="'Both'"):
            pipeline.run()
    assert runs == []


def test_the_options_hold_and_a_drain_is_planned_as_one() -> None:
    with dry_runs() as runs:
        pipeline = beam.Pipeline(
            LuminosityRunner(is_drain=True), PipelineOptions(["--accelerators=2", "--cpu_workers=3"])
        )
        ranges = pipeline | beam.Create([(0, 9)]) | beam.ParDo(Numbers(0.0))
        _ = ranges | beam.Map(str).with_resource_hints(accelerator="count:1")
        pipeline.run()
    (one,) = runs
    plan = explain(one.prepared, one.pipeline, is_full=True)
    assert {pool.name: pool.workers for pool in plan.pools} == {"cpu": 3, "device": 2}
    steps = [step.name for stage in plan.stages for step in stage.steps]
    assert [name for name in steps if name.endswith("TruncateAndSizeRestriction")]


def test_afterwards_pipelines_are_made_for_their_own_runner() -> None:
    with dry_runs():
        assert isinstance(beam.Pipeline().runner, DryRunner)
    assert not isinstance(beam.Pipeline(runner="DirectRunner").runner, DryRunner)
    assert LuminosityRunner.warms_up
