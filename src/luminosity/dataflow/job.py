"""The message that creates a job: the body of Dataflow's ``projects.locations.jobs.create``.

Beam writes the same for ``--template_location``, with a time in the job's name and in its folders. Here they have none,
so that two descriptions of one pipeline can be compared.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Mapping
from typing import Any

import apache_beam
from apache_beam.options.pipeline_options import (
    DebugOptions,
    GoogleCloudOptions,
    PipelineOptions,
    StandardOptions,
    WorkerOptions,
)
from apache_beam.options.value_provider import ValueProvider
from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.runners.internal.names import STAGED_PIPELINE_FILENAME
from apache_beam.transforms.display import DisplayData

from luminosity.dataflow.capture import image_of

__all__ = ["PIPELINE_FILE", "describe_job", "job_name_of"]

PIPELINE_FILE = STAGED_PIPELINE_FILENAME
_STORAGE = "storage.googleapis.com"
_ENVIRONMENT_VERSION = "8"  # what Beam tells Dataflow about its workers
_LONGEST_NAME = 63  # characters of a job's name
_MULTI_CORE = common_urns.protocols.MULTI_CORE_BUNDLE_PROCESSING.urn
_AUTOSCALING = {"NONE": "AUTOSCALING_ALGORITHM_NONE", "THROUGHPUT_BASED": "AUTOSCALING_ALGORITHM_BASIC"}
_NOT_FOR_WORKERS = "impersonate_service_account"  # for those who start the job


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
