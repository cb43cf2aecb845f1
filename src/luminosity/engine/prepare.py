"""Preparation of a pipeline before anything starts: check its features and options, plan it, assign pools."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from apache_beam.options.pipeline_options import PipelineOptions, PortableOptions, SetupOptions, StandardOptions
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.transforms import environments
from apache_beam.transforms.resources import resource_hints_from_options

from luminosity.engine.options import EngineConfig
from luminosity.engine.plan import support
from luminosity.engine.plan.effects import effects_of
from luminosity.engine.plan.graph import Graph
from luminosity.engine.plan.planner import plan
from luminosity.engine.resources.claims import Claim
from luminosity.engine.resources.fitting import give_devices, warn_of_unused, with_chosen_hints, with_uniform_hints
from luminosity.engine.resources.hints import Needs, python_environment
from luminosity.engine.resources.machine import Machine
from luminosity.engine.resources.pools import Assignment, assign, assign_to_this_process
from luminosity.engine.resources.python_environments import PythonEnvironment, check_environments
from luminosity.errors import OptionError

if TYPE_CHECKING:
    from luminosity.engine.cluster.driver.session import Session

__all__ = ["Prepared", "prepare", "worker_environment"]

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A pipeline that is ready to run."""

    graph: Graph
    assignments: dict[str, Assignment]
    config: EngineConfig
    machine: Machine
    session: Session | None = None  # the connection to a cluster, which the receiver closes; None for this machine


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
    session = _connect(config, pipeline, options, is_dry=is_dry)
    try:
        return _prepare(pipeline, options, config, session, is_drain=is_drain, fit=fit, claim=claim)
    except BaseException:
        if session is not None:
            session.close()
        raise


def _connect(
    config: EngineConfig, pipeline: beam_runner_api_pb2.Pipeline, options: PipelineOptions, *, is_dry: bool
) -> Session | None:
    """Return a session of the cluster, or None if the pipeline runs on this machine."""
    if config.ray_address is None:
        return None
    from luminosity.engine.cluster import shipping  # a run on one machine needs none of it
    from luminosity.engine.cluster.driver.ray_nodes import nodes
    from luminosity.engine.cluster.driver.session import connect
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
    session = connect(config.ray_address, config.accelerators)
    try:
        session.sent = sent
        session.paths = SharedPaths(effects_of(pipeline), sent.folder, sent.files)
        session.paths.check(nodes())
        if not session.paths.is_in_place:
            for warning in sent.warnings:
                _LOGGER.warning("%s", warning)
    except BaseException:
        session.close()
        raise
    return session


def _prepare(
    pipeline: beam_runner_api_pb2.Pipeline,
    options: PipelineOptions,
    config: EngineConfig,
    session: Session | None,
    *,
    is_drain: bool,
    fit: Callable[[EngineConfig, Callable[[frozenset[str]], Graph]], Graph] | None,
    claim: Claim | None,
) -> Prepared:
    is_streaming = bool(options.view_as(StandardOptions).streaming)
    support.warn(pipeline, is_streaming=is_streaming, is_debug=config.debug)
    pipeline = with_chosen_hints(pipeline, config)
    pythons = _pythons(pipeline, config)  # before a checkpoint is opened, or given up for a new start
    if session is None:
        machine = Machine.detect(config.accelerators)
    else:
        from luminosity.engine.cluster.driver.ray_nodes import known_types, nodes

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

        if claim is None or session is not None:  # on a cluster, Ray decides what runs beside what
            assignments = make_pools(machine)
        else:
            assignments = claim.take({s.id: each for s, each in stages}, machine, config.when_busy, make_pools)
        warn_of_unused(machine, assignments.values())
    if config.checkpoint_dir is not None and graph.test_streams:
        names = ", ".join(repr(stream.name) for stream in graph.test_streams)
        raise OptionError(
            f"--checkpoint_dir: found a TestStream ({names}), expected sources that last longer than a test"
        )
    return Prepared(graph, assignments, config, machine, session)


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
