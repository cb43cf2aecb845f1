"""Captures the pipelines that a script runs, translated for Dataflow as Beam's own runner does it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import apache_beam
from apache_beam import Pipeline
from apache_beam.options.pipeline_options import (
    DebugOptions,
    PipelineOptions,
    SetupOptions,
    StandardOptions,
    TypeOptions,
    WorkerOptions,
)
from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.runners.dataflow import dataflow_runner
from apache_beam.runners.dataflow.internal.names import DATAFLOW_CONTAINER_IMAGE_REPOSITORY
from apache_beam.runners.dataflow.ptransform_overrides import get_dataflow_transform_overrides
from apache_beam.runners.pipeline_utils import merge_common_environments, merge_superset_dep_environments
from apache_beam.runners.portability.fn_api_runner import translations
from apache_beam.runners.runner import PipelineRunner
from apache_beam.transforms import environments
from apache_beam.utils.plugin import BeamPlugin

from luminosity.engine.explain.dryrun import DryResult, replaced_runners
from luminosity.engine.prepare import effects_of
from luminosity.runs.manifest.places import Effects

__all__ = ["DATAFLOW_RUNNER", "CapturedPipeline", "captured_pipelines", "default_image"]

DATAFLOW_RUNNER = dataflow_runner.DataflowRunner.__name__
_PROCESSES = (
    "use_multiple_sdk_containers",
    "no_use_multiple_sdk_containers",
)  # a Python process per core, or per worker
_PACK_COMBINERS = "pack_combiners"  # the one phase that Beam lets users choose


@dataclass(frozen=True)
class CapturedPipeline:
    """A pipeline that a script asked to run, as Dataflow would get it."""

    proto: beam_runner_api_pb2.Pipeline
    options: PipelineOptions  # with the experiments that Beam adds for Dataflow
    meant_for: str  # the runner that the script or its options name
    places: Effects  # what it reads, writes and loads, as far as its transforms tell
    became_streaming: bool  # whether it is streaming because of its sources, without --streaming


@contextlib.contextmanager
def captured_pipelines() -> Generator[list[CapturedPipeline]]:
    """Within the context, translate every pipeline that is run for Dataflow, whatever its runner, and run none.

    Yields the list to which the pipelines are appended. Raises what Beam raises if it can't translate one.
    """
    captured: list[CapturedPipeline] = []
    with replaced_runners(lambda meant_for: CapturingRunner(captured, meant_for)):
        yield captured


class CapturingRunner(dataflow_runner.DataflowRunner):
    """Does what Beam's runner does before it sends a pipeline. It needs none of the libraries of Google Cloud.

    Beam's validation of options goes by the runner's class name, so it does not refuse options that are missing: the
    checks of this package do, together with everything else.
    """

    def __init__(self, captured: list[CapturedPipeline], meant_for: str | PipelineRunner) -> None:
        super().__init__()
        self._captured = captured
        self._meant_for = meant_for if isinstance(meant_for, str) else type(meant_for).__name__

    def run_pipeline(self, pipeline: Pipeline, options: PipelineOptions, pipeline_proto: Any = None) -> DryResult:  # pyright: ignore[reportIncompatibleMethodOverride]  # Beam's has no annotations
        """Translate the pipeline and keep it."""
        dataflow_runner._check_and_add_missing_options(options)  # pyright: ignore[reportPrivateUsage]
        was_streaming = bool(options.view_as(StandardOptions).streaming)
        self._replace_transforms(pipeline, options)
        docker: Any = environments.DockerEnvironment  # a class, which a decorator without types hides
        environment = docker.from_container_image(
            image_of(options), resource_hints=environments.resource_hints_from_options(options)
        )
        proto = pipeline.to_runner_api(default_environment=environment)
        is_unbounded = any(
            each.is_bounded == beam_runner_api_pb2.IsBounded.UNBOUNDED
            for each in proto.components.pcollections.values()
        )
        if is_unbounded and not options.view_as(DebugOptions).lookup_experiment(
            "unsafely_attempt_to_process_unbounded_data_in_batch_mode"
        ):
            options.view_as(StandardOptions).streaming = True
        if options.view_as(StandardOptions).streaming:
            dataflow_runner._check_and_add_missing_streaming_options(options)  # pyright: ignore[reportPrivateUsage]
        places = effects_of(proto)  # before the optimisation, which drops what composite transforms show
        proto = _optimized(_with_docker_environments(proto), options)
        _add_settings_of_workers(options)
        is_streaming = bool(options.view_as(StandardOptions).streaming)
        became_streaming = is_streaming and not was_streaming
        self._captured.append(CapturedPipeline(proto, options, self._meant_for, places, became_streaming))
        return DryResult()

    def _replace_transforms(self, pipeline: Pipeline, options: PipelineOptions) -> None:
        deterministic = not options.view_as(TypeOptions).allow_non_deterministic_key_coders
        pipeline.visit(self.combinefn_visitor())
        pipeline.visit(self.side_input_visitor(deterministic_key_coders=deterministic))
        pipeline.replace_all(self._PTRANSFORM_OVERRIDES)
        if overrides := get_dataflow_transform_overrides(options):
            pipeline.replace_all(overrides)
        self._adjust_pipeline_for_dataflow_v2(pipeline)


def _add_settings_of_workers(options: PipelineOptions) -> None:
    """Add what workers import, and what Beam makes of options that Dataflow knows as experiments."""
    setup = options.view_as(SetupOptions)
    setup.beam_plugins = list(dict.fromkeys([*BeamPlugin.get_all_plugin_paths(), *(setup.beam_plugins or ())]))
    debug = options.view_as(DebugOptions)
    if platform := options.view_as(WorkerOptions).min_cpu_platform:
        debug.add_experiment(f"min_cpu_platform={platform}")
    if not any(name in (debug.experiments or ()) for name in _PROCESSES):
        debug.add_experiment(_PROCESSES[0])


def image_of(options: PipelineOptions) -> str:
    """Return the container image of steps without one of their own."""
    return options.view_as(WorkerOptions).sdk_container_image or default_image()


def default_image() -> str:
    """Return the image that Dataflow has for this version of Python and of Beam."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"{DATAFLOW_CONTAINER_IMAGE_REPOSITORY}/beam_python{python}_sdk:{apache_beam.__version__}"


def _with_docker_environments(proto: beam_runner_api_pb2.Pipeline) -> beam_runner_api_pb2.Pipeline:
    """Let each environment be a container, and merge those that are the same. Hints that differ keep them apart."""
    for environment in proto.components.environments.values():
        docker = environments.resolve_anyof_environment(environment, common_urns.environments.DOCKER.urn)
        environment.CopyFrom(docker)
    return merge_common_environments(merge_superset_dep_environments(proto))


def _optimized(proto: beam_runner_api_pb2.Pipeline, options: PipelineOptions) -> beam_runner_api_pb2.Pipeline:
    """Pack combiners and sort the transforms, as Beam does for batch jobs."""
    if options.view_as(StandardOptions).streaming:
        return proto
    chosen = str(options.view_as(DebugOptions).lookup_experiment("pre_optimize", "default")).lower()
    if chosen == "none":
        return proto
    packs = chosen in ("default", "all") or _PACK_COMBINERS in chosen.split(",")
    phases: list[Any] = [translations.pack_combiners] if packs else []
    return translations.optimize_pipeline(
        proto, phases=[*phases, translations.sort_stages], known_runner_urns=frozenset(), partial=True
    )
