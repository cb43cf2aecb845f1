"""Preparation of a pipeline before anything starts: check its features and options, plan it, assign pools.

:func:`effects_of` says what a pipeline reads and writes: what its transforms declare, and what Beam's own show in their
display data.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from apache_beam.options.pipeline_options import PipelineOptions, PortableOptions, SetupOptions, StandardOptions
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.transforms import environments
from apache_beam.transforms.resources import resource_hints_from_options

from luminosity.core import MODELS, READS, WRITES
from luminosity.engine.options import EngineConfig
from luminosity.engine.plan import support
from luminosity.engine.plan.graph import Graph
from luminosity.engine.plan.partitions import with_groupers
from luminosity.engine.plan.planner import plan
from luminosity.engine.resources.claims import Claim
from luminosity.engine.resources.fitting import give_devices, warn_of_unused, with_chosen_hints, with_uniform_hints
from luminosity.engine.resources.hints import Needs, python_environment
from luminosity.engine.resources.machine import Machine
from luminosity.engine.resources.pools import Assignment, assign, assign_to_this_process
from luminosity.engine.resources.python_environments import PythonEnvironment, check_environments
from luminosity.errors import OptionError
from luminosity.events import ModelVersion
from luminosity.runs.manifest.places import Effects, Place

if TYPE_CHECKING:
    from luminosity.engine.cluster.driver.ray_connection import RayConnection

__all__ = ["Prepared", "effects_of", "prepare", "worker_environment"]

_LOGGER = logging.getLogger(__name__)
_FILE_PATTERN = "file_pattern"  # the key with which Beam's sources and sinks show their files
_SINK = "Sink"  # how the names of classes of Beam's sinks end
_SHARD = re.compile(r"%\(\w+\)\d*d")  # the number of a shard in the pattern of a sink
# Transforms that neither read nor write anything outside of the pipeline.
_CLOSED = frozenset({"Create", "Impulse", "Flatten", "GroupByKey", "CombinePerKey", "CombineGlobally", "Reshuffle"}) | {
    "WindowInto",
}


@dataclass(frozen=True)
class Prepared:
    """A pipeline that is ready to run."""

    graph: Graph
    assignments: dict[str, Assignment]
    config: EngineConfig
    machine: Machine
    connection: RayConnection | None = None  # to a cluster, which the receiver closes; None for this machine


def worker_environment(options: PipelineOptions) -> environments.Environment:
    """Return the environment of steps without hints: this Python, with the hints from the options."""
    environment: Any = environments.EmbeddedPythonEnvironment  # Beam's decorator hides its type
    return environment(
        capabilities=environments.python_sdk_capabilities(),
        artifacts=(),
        resource_hints=resource_hints_from_options(options.view_as(PortableOptions)),
    )


def prepare(
    pipeline: beam_runner_api_pb2.Pipeline,
    options: PipelineOptions,
    *,
    is_drain: bool = False,
    fit: Callable[[EngineConfig, Callable[[frozenset[str]], Graph]], Graph] | None = None,
    claim: Claim | None = None,
    is_dry: bool = False,
) -> Prepared:
    """Return how ``pipeline`` would run. Starts nothing, but connects to the cluster if ``options`` name one.

    ``fit`` gets a function that plans the pipeline, given the names of steps that must start a stage, and returns the
    plan to run: one that can continue from a checkpoint. With ``claim``, the pipeline gets what other runs leave of the
    machine, and claims it; this may wait for them. ``is_dry`` says that the pipeline is not run, so that a cluster gets
    no files of it.

    Raises :class:`OptionError`, :class:`UnsupportedPipeline` or :class:`ResourcesExceeded` if it can't run.
    """
    config = EngineConfig.of(options)
    support.check(pipeline)
    connection = _connect(config, pipeline, options, is_dry=is_dry)
    try:
        return _prepare(pipeline, options, config, connection, is_drain=is_drain, fit=fit, claim=claim)
    except BaseException:
        if connection is not None:
            connection.close()
        raise


def _connect(
    config: EngineConfig, pipeline: beam_runner_api_pb2.Pipeline, options: PipelineOptions, *, is_dry: bool
) -> RayConnection | None:
    """Return a connection to the cluster, or None if the pipeline runs on this machine."""
    if config.ray_address is None:
        return None
    from luminosity.engine.cluster import shipping  # a run on one machine needs none of it
    from luminosity.engine.cluster.driver.ray_calls import nodes
    from luminosity.engine.cluster.driver.ray_connection import connect
    from luminosity.engine.cluster.driver.shared_paths import SharedPaths

    for step in pipeline.components.transforms.values():
        environment = pipeline.components.environments.get(step.environment_id)
        if environment is not None and (path := python_environment(environment)):
            raise OptionError(
                f"--ray_address: found that step {step.unique_name!r} runs in another Python environment ({path}), "
                "expected none on a cluster",
                fix="leave the hint python_environment out, or run without --ray_address",
            )
    if is_dry:
        return connect(config.ray_address, config.accelerators)
    setup = options.view_as(SetupOptions)
    sent = shipping.pack(  # before the connection, since what the user has given may be wrong
        setup_file=setup.setup_file,
        requirements_file=setup.requirements_file,
        extra_packages=setup.extra_packages or [],
    )
    connection = connect(config.ray_address, config.accelerators)
    try:
        connection.sent = sent
        connection.paths = SharedPaths(effects_of(pipeline), sent.folder, sent.files)
        connection.paths.check(nodes())
        if not connection.paths.is_in_place:
            for warning in sent.warnings:
                _LOGGER.warning("%s", warning)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(
    pipeline: beam_runner_api_pb2.Pipeline,
    options: PipelineOptions,
    config: EngineConfig,
    connection: RayConnection | None,
    *,
    is_drain: bool,
    fit: Callable[[EngineConfig, Callable[[frozenset[str]], Graph]], Graph] | None,
    claim: Claim | None,
) -> Prepared:
    is_streaming = bool(options.view_as(StandardOptions).streaming)
    support.warn(pipeline, is_streaming=is_streaming, is_debug=config.debug)
    pipeline = with_chosen_hints(pipeline, config)
    pythons = _pythons(pipeline, config)  # before a checkpoint is opened, or given up for a new start
    if connection is None:
        machine = Machine.detect(config.accelerators)
    else:
        from luminosity.engine.cluster.driver.ray_calls import known_types, nodes

        machine = Machine.of_cluster(nodes(), config.accelerators, known_types())
    if not config.debug:
        pipeline = give_devices(pipeline, machine, config)
    if config.pools == "uniform":
        pipeline = with_uniform_hints(pipeline)

    def make_plan(roots: frozenset[str]) -> Graph:
        return plan(pipeline, is_drain=is_drain, is_durable=config.checkpoint_dir is not None, roots=roots)

    graph = fit(config, make_plan) if fit is not None else make_plan(frozenset())
    if config.debug:
        assignments = assign_to_this_process(graph.stages, machine)
    else:
        needs = {key: Needs.of(e) for key, e in graph.components.environments.items()}
        stages = [(s, needs[s.environment_id]) for s in graph.stages]

        def make_pools(machine: Machine, *, is_quiet: bool = False) -> dict[str, Assignment]:
            return assign(stages, machine, config, pythons, is_quiet=is_quiet)

        if claim is None or connection is not None:  # on a cluster, Ray decides what runs beside what
            assignments = make_pools(machine)
        else:
            assignments = claim.take({s.id: each for s, each in stages}, machine, config.when_busy, make_pools)
        warn_of_unused(machine, assignments.values())
        graph, assignments = _with_groupers(graph, assignments, config)
    if config.checkpoint_dir is not None and graph.test_streams:
        names = ", ".join(repr(stream.name) for stream in graph.test_streams)
        raise OptionError(
            f"--checkpoint_dir: found a TestStream ({names}), expected sources that last longer than a test"
        )
    return Prepared(graph, assignments, config, machine, connection)


def _with_groupers(
    graph: Graph, assignments: dict[str, Assignment], config: EngineConfig
) -> tuple[Graph, dict[str, Assignment]]:
    """Let workers group large input, where they share this machine and nothing of the run is kept in a checkpoint."""
    if config.ray_address is not None or config.checkpoint_dir is not None or graph.test_streams:
        return graph, assignments
    pools = {
        stage_id: assignment.pool
        for stage_id, assignment in assignments.items()
        if not assignment.pool.device_groups and assignment.pool.python is None
    }
    slots = {stage_id: pool.workers * pool.slots for stage_id, pool in pools.items()}
    graph, places = with_groupers(graph, slots)
    return graph, assignments | {grouper: assignments[stage] for grouper, stage in places.items()}


def _pythons(pipeline: beam_runner_api_pb2.Pipeline, config: EngineConfig) -> dict[str, PythonEnvironment]:
    """Return the Python environments that steps ask for, by path.

    Raises :class:`UnsupportedPipeline` if workers can't run in one, and :class:`OptionError` with ``--debug``, which
    runs all steps in this process.
    """
    paths = {key: python_environment(each) for key, each in pipeline.components.environments.items()}
    steps = sorted(pipeline.components.transforms.values(), key=lambda step: step.unique_name)
    named = [step for step in steps if step.unique_name and step.environment_id in paths]
    wanted = [(step.unique_name, paths[step.environment_id]) for step in named]
    wanted += [("of the pipeline", path) for path in paths.values()]  # the default one may have no step
    if not config.debug:
        return check_environments(wanted)
    others = {path: f"{step!r} in {path}" for step, path in reversed(wanted) if path}
    if others:
        raise OptionError(
            f"--debug: found steps that run in another Python environment ({', '.join(others.values())}), "
            "expected none, since all steps run in this process",
            fix="run without --debug, or leave the hint python_environment out while you debug",
        )
    return {}


def effects_of(pipeline: beam_runner_api_pb2.Pipeline, versions: tuple[ModelVersion, ...] = ()) -> Effects:
    """Return what a pipeline reads and writes, given as Beam hands it over, with its composite transforms."""
    reads: dict[Place, None] = {}
    writes: dict[Place, None] = {}
    models: dict[Place, None] = {}
    seeds: dict[str, str] = {}
    transforms = pipeline.components.transforms
    for transform in transforms.values():
        step = transform.unique_name
        reads |= dict.fromkeys(_declared(transform, READS))
        writes |= dict.fromkeys(_declared(transform, WRITES))
        for path in json.loads(transform.annotations.get(MODELS, b"[]")):
            here = os.path.abspath(path) if os.path.exists(path) else path
            models[Place(step, here, "model")] = None
        for shown in _display_data(transform):
            if shown.key == _FILE_PATTERN and shown.string_value:
                is_sink = shown.namespace.endswith(_SINK)
                path = _SHARD.sub("*", shown.string_value) if is_sink else shown.string_value
                is_local = "://" not in path
                whole = os.path.abspath(path) if is_local else path
                place = Place(_outer(step), whole, is_relative=is_local and not os.path.isabs(path))
                (writes if is_sink else reads)[place] = None
            elif "seed" in shown.key.lower() and shown.WhichOneof("value") == "int_value":
                seeds[f"{step}: {shown.key}"] = str(shown.int_value)
    for version in versions:
        models[Place(version.step, version.name, "model", version.version, version.digest)] = None
    known = {place.step for place in (*reads, *writes)}
    return Effects(
        _distinct(reads), _distinct(writes), tuple(models), tuple(_unknown(pipeline, known)), tuple(seeds.items())
    )


def _declared(transform: beam_runner_api_pb2.PTransform, annotation: str) -> Iterator[Place]:
    for fields in json.loads(transform.annotations.get(annotation, b"[]")):
        yield Place(transform.unique_name, **fields)


def _display_data(transform: beam_runner_api_pb2.PTransform) -> Iterator[beam_runner_api_pb2.LabelledPayload]:
    for shown in transform.display_data:
        yield beam_runner_api_pb2.LabelledPayload.FromString(shown.payload)


def _outer(step: str) -> str:
    """Return the transform that the user applied: Beam's sources and sinks have a ``Read`` or ``Write`` inside.

    >>> _outer("Lines/Read"), _outer("Write")
    ('Lines', 'Write')
    """
    outer, _, inner = step.rpartition("/")
    return outer if outer and inner in ("Read", "Write") else step


def _distinct(places: dict[Place, None]) -> tuple[Place, ...]:
    """Return each place once, with the outermost step: a composite shows the files of its parts, too."""
    found: dict[tuple[str, str], Place] = {}
    for place in sorted(places, key=lambda each: len(each.step)):
        found.setdefault((place.path, place.name), place)
    return tuple(found.values())


def _unknown(pipeline: beam_runner_api_pb2.Pipeline, known: set[str]) -> Iterator[str]:
    """Yield steps at the borders of the pipeline, those that read or write, of which no place is known."""
    transforms = pipeline.components.transforms
    top = [transforms[child] for root in pipeline.root_transform_ids for child in transforms[root].subtransforms]
    if not top:
        top = [transforms[root] for root in pipeline.root_transform_ids]
    consumed = {pcollection for each in top for pcollection in each.inputs.values()}
    for each in top:
        kind = each.annotations.get("python_type", b"").decode(errors="replace").rpartition(".")[2]
        is_border = not each.inputs or not consumed & {*each.outputs.values()}
        is_known = any(step == each.unique_name or step.startswith(f"{each.unique_name}/") for step in known)
        if is_border and not is_known and kind not in _CLOSED:
            yield each.unique_name
