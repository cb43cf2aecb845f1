"""Tests of tables run on both runners, since nothing here may need the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.runner import create_runner

Pipelines = Callable[..., Any]


@pytest.fixture(params=["FnApiRunner", "luminosity.LuminosityRunner"], ids=["fnapi", "luminosity"])
def pipelines(request: pytest.FixtureRequest) -> Pipelines:
    """Makes a context that builds a pipeline and runs it at its end."""
    ours = ["--progress=off"] if "luminosity" in request.param else []

    @contextmanager
    def pipeline(*flags: str) -> Iterator[beam.Pipeline]:
        built = beam.Pipeline(create_runner(request.param), PipelineOptions([*ours, *flags]))
        yield built
        built.run().wait_until_finish()

    return pipeline
