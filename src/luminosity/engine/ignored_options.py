"""Flags of Beam's other runners that have no effect: which they are, and the warning that names them."""

from __future__ import annotations

import logging

from apache_beam.options.pipeline_options import DebugOptions, PipelineOptions

__all__ = ["WORKER_ACCELERATOR", "warn_of_ignored"]

_LOGGER = logging.getLogger(__name__)

WORKER_ACCELERATOR = "worker_accelerator="  # of --experiments and --dataflow_service_options

# Flags of Beam's other runners that mean nothing here.
_FOR_ENVIRONMENTS = (
    "environment_config",
    "environment_options",
    "environment_type",
    "extra_packages",
    "files_to_stage",
    "prebuild_sdk_container_engine",
    "requirements_file",
    "sdk_container_image",
    "setup_file",
)
# Those of them that say what workers of a Ray cluster need.
_USED_ON_RAY = ("extra_packages", "requirements_file", "setup_file")
_FOR_CLUSTERS = (
    "artifact_endpoint",
    "autoscaling_algorithm",
    "create_from_snapshot",
    "direct_runner_bundle_repeat",
    "direct_running_mode",
    "disk_size_gb",
    "disk_type",
    "flexrs_goal",
    "flink_master",
    "flink_version",
    "job_endpoint",
    "machine_type",
    "max_num_workers",
    "max_parallelism",
    "min_cpu_platform",
    "network",
    "num_workers",
    "parallelism",
    "spark_master_url",
    "spark_version",
    "subnetwork",
    "template_location",
    "transform_name_mapping",
    "update",
    "use_public_ips",
    "worker_region",
    "worker_zone",
    "zone",
)

_IN_THIS_PYTHON = "Workers run in this Python environment and use the packages installed in it."
_PROCESSES = "Workers are processes of this machine; --cpu_workers sets their number."
_ON_RAY = "Workers run on the nodes of a cluster; --requirements_file and --setup_file bring packages to them."
_ON_NODES = "Workers run on the nodes of a cluster; --cpu_workers and --accelerators set their number."


def warn_of_ignored(options: PipelineOptions, *, is_cluster: bool) -> None:
    """Log one warning that names the given flags without an effect."""
    given = options.get_all_options(drop_default=True)
    known = ("beam_fn_api", "use_runner_v2", "use_unified_worker")
    experiments = options.view_as(DebugOptions).experiments or ()
    experiments = [e for e in experiments if e not in known and not e.startswith(WORKER_ACCELERATOR)]
    if experiments:
        _LOGGER.info("experiments passed to the workers: %s", ", ".join(experiments))
    used = _USED_ON_RAY if is_cluster else ()
    packages = [name for name in _FOR_ENVIRONMENTS if given.get(name) and name not in used]
    # A start with a checkpoint is an update of the pipeline that made it.
    used = ("transform_name_mapping", "update") if given.get("checkpoint_dir") else ()
    cluster = [name for name in _FOR_CLUSTERS if given.get(name) is not None and name not in used]
    if packages or cluster:
        reasons = [
            *([_ON_RAY if is_cluster else _IN_THIS_PYTHON] if packages else []),
            *([_ON_NODES if is_cluster else _PROCESSES] if cluster else []),
        ]
        names = ", ".join(f"--{name}" for name in (*packages, *cluster))
        _LOGGER.warning("%s: no effect here. %s", names, " ".join(reasons))
