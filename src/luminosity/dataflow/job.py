"""Captures the pipelines that a script runs, translated for Dataflow, and describes one as a job.

The description is the body of Dataflow's ``projects.locations.jobs.create``. Beam writes the same for
``--template_location``, with a time in the job's name and in its folders. Here they have none, so that two
descriptions of one pipeline can be compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import sys
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import apache_beam
from apache_beam import Pipeline
from apache_beam.options.pipeline_options import (
    DebugOptions,
    GoogleCloudOptions,
    PipelineOptions,
    SetupOptions,
    StandardOptions,
    TypeOptions,
    WorkerOptions,
)
from apache_beam.options.value_provider import ValueProvider
from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.runners.dataflow import dataflow_runner
from apache_beam.runners.dataflow.internal.names import DATAFLOW_CONTAINER_IMAGE_REPOSITORY
from apache_beam.runners.dataflow.ptransform_overrides import get_dataflow_transform_overrides
from apache_beam.runners.internal.names import STAGED_PIPELINE_FILENAME
from apache_beam.runners.pipeline_utils import merge_common_environments, merge_superset_dep_environments
from apache_beam.runners.portability.fn_api_runner import translations
from apache_beam.runners.runner import PipelineRunner
from apache_beam.transforms import environments
from apache_beam.transforms.display import DisplayData
from apache_beam.utils.plugin import BeamPlugin

from luminosity.engine.explain.dryrun import DryResult, replaced_runners
from luminosity.engine.prepare import effects_of
from luminosity.runs.manifest.places import Effects

__all__ = [
    "DATAFLOW_RUNNER",
    "PIPELINE_FILE",
    "CapturedPipeline",
    "captured_pipelines",
    "default_image",
    "describe_job",
    "job_name_of",
]

PIPELINE_FILE = STAGED_PIPELINE_FILENAME
_STORAGE = "storage.googleapis.com"
_ENVIRONMENT_VERSION = "8"  # what Beam tells Dataflow about its workers
_LONGEST_NAME = 63  # characters of a job's name
_MULTI_CORE = common_urns.protocols.MULTI_CORE_BUNDLE_PROCESSING.urn
_AUTOSCALING = {"NONE": "AUTOSCALING_ALGORITHM_NONE", "THROUGHPUT_BASED": "AUTOSCALING_ALGORITHM_BASIC"}
_NOT_FOR_WORKERS = "impersonate_service_account"  # for those who start the job
DATAFLOW_RUNNER = dataflow_runner.DataflowRunner.__name__
# a Python process per core, or per worker
_PROCESSES = ("use_multiple_sdk_containers", "no_use_multiple_sdk_containers")
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


def job_name_of(options: PipelineOptions, script: str) -> str:
    """Return the job's name: ``--job_name``, or one made from the name of the script.

    >>> job_name_of(PipelineOptions([]), "Shop_reviews.py"), job_name_of(PipelineOptions(["--job_name=a"]), "b.py")
    ('shop-reviews', 'a')
    """
    if given := options.view_as(GoogleCloudOptions).job_name:
        return given
    plain = re.sub(r"[^a-z0-9]+", "-", script.rpartition(".")[0].lower() or script.lower()).strip("-")
    return (plain if plain[:1].isalpha() else f"job-{plain}")[:_LONGEST_NAME].rstrip("-")


def describe_job(
    pipeline: beam_runner_api_pb2.Pipeline, serialized: bytes, options: PipelineOptions, name: str
) -> dict[str, Any]:
    """Return the job as JSON. ``serialized`` are the bytes of the pipeline, which the job names by their digest.

    The options must have a project and a ``temp_location``.
    """
    cloud = options.view_as(GoogleCloudOptions)
    job: dict[str, Any] = {
        "name": name,
        "type": "JOB_TYPE_STREAMING" if options.view_as(StandardOptions).streaming else "JOB_TYPE_BATCH",
        "projectId": cloud.project,
        "location": cloud.region,
        "environment": _environment(pipeline, serialized, options, name),
    }
    if labels := _labels(cloud.labels):
        job["labels"] = labels
    if cloud.create_from_snapshot:
        job["createdFromSnapshotId"] = cloud.create_from_snapshot
    if cloud.update and cloud.transform_name_mapping:
        job["transformNameMapping"] = dict(cloud.transform_name_mapping)
    return job


def _environment(
    pipeline: beam_runner_api_pb2.Pipeline, serialized: bytes, options: PipelineOptions, name: str
) -> dict[str, Any]:
    cloud, worker = options.view_as(GoogleCloudOptions), options.view_as(WorkerOptions)
    is_streaming = bool(options.view_as(StandardOptions).streaming)
    staged = f"{(cloud.staging_location or cloud.temp_location).rstrip('/')}/{name}"
    displayed: Any = DisplayData.create_from_options(options).items
    environment: dict[str, Any] = {
        "clusterManagerApiService": GoogleCloudOptions.COMPUTE_API_SERVICE,
        "dataset": f"{GoogleCloudOptions.BIGQUERY_API_SERVICE}/cloud_dataflow",
        "tempStoragePrefix": f"{cloud.temp_location.rstrip('/')}/{name}".replace("gs:/", _STORAGE),
        "userAgent": {
            "name": f"Apache Beam Python {sys.version_info.major}.{sys.version_info.minor} SDK",
            "version": apache_beam.__version__,
        },
        "version": {"job_type": "FNAPI_STREAMING" if is_streaming else "FNAPI_BATCH", "major": _ENVIRONMENT_VERSION},
        "experiments": list(options.view_as(DebugOptions).experiments or []),
        "workerPools": [_worker_pool(pipeline, options)],
        "sdkPipelineOptions": {
            "options": _options(options, f"{staged}/{PIPELINE_FILE}", serialized),
            "display_data": [item.get_dict() for item in displayed],
        },
    }
    goals = {"COST_OPTIMIZED": "FLEXRS_COST_OPTIMIZED", "SPEED_OPTIMIZED": "FLEXRS_SPEED_OPTIMIZED"}
    optional = {
        "workerRegion": worker.worker_region,
        "workerZone": worker.worker_zone,
        "serviceAccountEmail": cloud.service_account_email,
        "serviceKmsKeyName": cloud.dataflow_kms_key,
        "flexResourceSchedulingGoal": goals.get(str(cloud.flexrs_goal)),
        "serviceOptions": cloud.dataflow_service_options,
        "debugOptions": {"enableHotKeyLogging": True} if cloud.enable_hot_key_logging else None,
    }
    return environment | {key: value for key, value in optional.items() if value}


def _worker_pool(pipeline: beam_runner_api_pb2.Pipeline, options: PipelineOptions) -> dict[str, Any]:
    worker = options.view_as(WorkerOptions)
    images = _container_images(pipeline)
    scaling = {
        "maxNumWorkers": worker.max_num_workers,
        "algorithm": _AUTOSCALING.get(str(worker.autoscaling_algorithm)),
    }
    pool: dict[str, Any] = {
        "kind": "harness",
        "taskrunnerSettings": {
            "parallelWorkerSettings": {
                "baseUrl": GoogleCloudOptions.DATAFLOW_ENDPOINT,
                "servicePath": options.view_as(GoogleCloudOptions).dataflow_endpoint,
            }
        },
        "autoscalingSettings": {key: value for key, value in scaling.items() if value},
    }
    optional = {
        "numWorkers": worker.num_workers,
        "machineType": worker.machine_type,
        "diskSizeGb": worker.disk_size_gb,
        "diskType": worker.disk_type,
        "diskProvisionedIops": worker.disk_provisioned_iops,
        "diskProvisionedThroughputMibps": worker.disk_provisioned_throughput_mibps,
        "zone": worker.zone,
        "network": worker.network,
        "subnetwork": worker.subnetwork,
        "numThreadsPerWorker": options.view_as(DebugOptions).number_of_worker_harness_threads,
        "sdkHarnessContainerImages": images,
    }
    pool |= {key: value for key, value in optional.items() if value}
    if len(images) <= 1:  # Dataflow expects it where there is one environment
        pool["workerHarnessContainerImage"] = images[0]["containerImage"] if images else image_of(options)
    if worker.use_public_ips is not None:
        pool["ipConfiguration"] = "WORKER_IP_PUBLIC" if worker.use_public_ips else "WORKER_IP_PRIVATE"
    if options.view_as(StandardOptions).streaming:
        pool["dataDisks"] = [{"diskType": worker.disk_type} if worker.disk_type else {}]
    return pool


def _container_images(pipeline: beam_runner_api_pb2.Pipeline) -> list[dict[str, Any]]:
    """Return the containers of all environments that transforms use. Resource hints are in the pipeline itself."""
    used = {each.environment_id for each in pipeline.components.transforms.values() if each.environment_id}
    images: list[dict[str, Any]] = []
    for identity in sorted(used):
        environment = pipeline.components.environments[identity]
        payload = beam_runner_api_pb2.DockerPayload.FromString(environment.payload)
        image = {"containerImage": payload.container_image, "environmentId": identity}
        alone = {} if _MULTI_CORE in environment.capabilities else {"useSingleCorePerContainer": True}
        images.append({**image, **alone, "capabilities": list(environment.capabilities)})
    return images


def _options(options: PipelineOptions, url: str, serialized: bytes) -> dict[str, Any]:
    """Return the options as workers get them, with the place and the digest of the pipeline."""
    found: dict[str, Any] = {}
    for key, value in options.get_all_options(retain_unknown_options=True).items():
        if value is None or key == _NOT_FOR_WORKERS:
            continue
        if isinstance(value, ValueProvider):
            value = value.get() if value.is_accessible() else None
        found[key] = value
    return found | {"pipelineUrl": url, "pipelineProtoHash": hashlib.sha256(serialized).hexdigest()}


def _labels(given: Any) -> dict[str, str]:
    """Return labels as pairs; Beam takes ``KEY=VALUE`` words.

    >>> _labels(["team=shop", "trial"]), _labels(None), _labels({"team": "shop"})
    ({'team': 'shop', 'trial': ''}, {}, {'team': 'shop'})
    """
    if isinstance(given, Mapping):
        return {str(key): str(value) for key, value in given.items()}  # pyright: ignore[reportUnknownArgumentType]
    words = [given] if isinstance(given, str) else list(given or [])
    return {key: value for key, _, value in (word.partition("=") for word in words)}
