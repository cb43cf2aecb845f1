"""Fixtures for tests of what must run on any runner: each test once on Beam's own, and once on ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.runner import create_runner

RunnerName = str
Pipelines = Callable[..., Any]


@pytest.fixture(params=["FnApiRunner", "luminosity.LuminosityRunner"], ids=["fnapi", "luminosity"])
def runner_name(request: pytest.FixtureRequest) -> RunnerName:
    return request.param


@pytest.fixture
def pipelines(runner_name: RunnerName) -> Pipelines:
    """Makes a context that builds a pipeline and runs it at its end; `.result` is what the run returned."""

    class Run:
        result: Any = None

    @contextmanager
    def pipeline(*flags: str) -> Iterator[tuple[beam.Pipeline, Run]]:
        ours = ["--progress=off"] if "luminosity" in runner_name else []
        built = beam.Pipeline(create_runner(runner_name), PipelineOptions([*ours, *flags]))
        run = Run()
        yield built, run
        run.result = built.run()
        run.result.wait_until_finish()

    return pipeline


def counters(result: Any) -> dict[str, int]:
    """The sums of a run's counters, by name."""
    found: dict[str, int] = {}
    for counter in result.metrics().query()["counters"]:
        found[counter.key.metric.name] = found.get(counter.key.metric.name, 0) + counter.committed
    return found
