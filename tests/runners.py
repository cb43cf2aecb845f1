"""The runner under test, chosen in this one place.

``LUMINOSITY_TEST_RUNNER=FnApiRunner`` runs the same tests on Beam's own local runner, to tell a mistake in a
test from a mistake in the engine. Tests of what only the engine does are left out then.

``LUMINOSITY_TEST_RAY=HOST:PORT`` runs them on the Ray cluster there, ``LUMINOSITY_TEST_RAY=start`` on one of three
nodes that pytest starts: see ``fake_cluster.py``.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.runners.runner import PipelineResult, PipelineRunner, create_runner
from apache_beam.transforms import window

RUNNER_NAME = os.environ.get("LUMINOSITY_TEST_RUNNER", "luminosity.LuminosityRunner")
IS_REFERENCE = RUNNER_NAME == "FnApiRunner"

# Where to run instead of on this machine: conftest.py sets the address of a cluster that it starts.
RAY_VARIABLE = "LUMINOSITY_TEST_RAY"
IS_CLUSTER = bool(os.environ.get(RAY_VARIABLE)) and not IS_REFERENCE

_ON_ONE_MACHINE = ("--debug", "--worker_start", "--when_busy")  # the runner refuses them on a cluster

# Every run ends in time even where a runner hangs; far above what any of these pipelines takes.
_RUN_TIMEOUT_S = 250


def new_runner(is_drain: bool = False) -> PipelineRunner:
    if not is_drain:
        return create_runner(RUNNER_NAME)
    if IS_REFERENCE:
        return FnApiRunner(is_drain=True)
    from luminosity import LuminosityRunner

    return LuminosityRunner(is_drain=True)


def flags(*extra: str) -> list[str]:
    """The flags of a quiet run; the reference runner knows none of ours."""
    if IS_REFERENCE:
        return []
    if not IS_CLUSTER:
        return ["--progress=off", *extra]
    if found := [flag for flag in extra if flag.startswith(_ON_ONE_MACHINE)]:
        pytest.skip(f"not on a cluster: {' '.join(found)}")
    return ["--progress=off", f"--ray_address={ray_address()}", *extra]


def ray_address() -> str:
    """The address of the cluster on which all tests run."""
    return os.environ[RAY_VARIABLE]


def beam_test_options(*extra: str) -> str:
    """The same for Beam's ``TestPipeline.pytest_test_pipeline_options``."""
    return " ".join([f"--runner={RUNNER_NAME}", *flags(*extra)])


def new_pipeline(*extra: str, is_drain: bool = False) -> beam.Pipeline:
    return beam.Pipeline(runner=new_runner(is_drain), options=PipelineOptions(flags(*extra)))


def start(build: Callable[[beam.Pipeline], Any], *extra: str) -> PipelineResult:
    """Start what `build` makes of a new pipeline with these flags."""
    pipeline = new_pipeline(*extra)
    build(pipeline)
    return pipeline.run()


def run(build: Callable[[beam.Pipeline], Any], *extra: str) -> PipelineResult:
    """Run what `build` makes of a new pipeline with these flags, to its end; raises what the run raises."""
    return finished(start(build, *extra))


def finished(result: PipelineResult) -> PipelineResult:
    """Wait for the run's end, but not for ever."""
    if result.wait_until_finish(duration=_RUN_TIMEOUT_S * 1000) is None:
        result.cancel()
        raise TimeoutError(f"the run did not end within {_RUN_TIMEOUT_S} s")
    return result


def collect(build: Callable[[beam.Pipeline], beam.PCollection], folder: Path, pipeline: beam.Pipeline) -> list[Any]:
    """The elements of what `build` makes of `pipeline`, in no particular order."""
    return collect_all(lambda p: {"elements": build(p)}, folder, pipeline)[0]["elements"]


def collect_all(
    build: Callable[[beam.Pipeline], dict[str, beam.PCollection]], folder: Path, pipeline: beam.Pipeline
) -> tuple[dict[str, list[Any]], PipelineResult]:
    """The elements of each collection that `build` makes of `pipeline`, and the run's result.

    They come back through one file per collection, written whole by a step that gets them as one element:
    a bundle that is tried again overwrites the file, so what is in it is what the runner delivers.
    """
    collections = build(pipeline)
    for name, elements in collections.items():
        (
            elements
            | f"{name}/InOneWindow" >> beam.WindowInto(window.GlobalWindows())
            | f"{name}/WithOneKey" >> beam.WithKeys(0)
            | f"{name}/Gather" >> beam.GroupByKey()
            | f"{name}/Write" >> beam.Map(_write_pickle, path=str(folder / f"{name}.pickle"))
        )
    result = finished(pipeline.run())
    return {name: _take_pickle(folder / f"{name}.pickle") for name in collections}, result


def _write_pickle(gathered: tuple[int, Any], path: str) -> None:
    unfinished = f"{path}.{os.getpid()}"
    with open(unfinished, "wb") as file:
        pickle.dump(list(gathered[1]), file)
    os.replace(unfinished, path)


def _take_pickle(path: Path) -> list[Any]:
    """The elements; nothing was written where the collection is empty."""
    if not path.exists():
        return []
    elements = pickle.loads(path.read_bytes())
    path.unlink()
    return elements
