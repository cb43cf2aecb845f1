"""What the runner takes from Beam's own flags and those of other runners, and which of them have no effect here."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from apache_beam.options.pipeline_options import (
    DebugOptions,
    DirectOptions,
    GoogleCloudOptions,
    PipelineOptions,
    PortableOptions,
)
from apache_beam.utils.plugin import BeamPlugin

from luminosity._shared.accelerators import parse_accelerator
from luminosity.errors import OptionError

__all__ = ["borrowed_cpu_workers", "warn_of_ignored", "whole_number", "worker_accelerator", "worker_options"]

_LOGGER = logging.getLogger(__name__)

_CACHE_MB = 100  # for the side inputs and state that each worker keeps from bundle to bundle
_WORKER_ACCELERATOR = "worker_accelerator="  # of --experiments and --dataflow_service_options

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


def warn_of_ignored(options: PipelineOptions, given: Mapping[str, Any], *, is_cluster: bool) -> None:
    """Log one warning that names those of the ``given`` flags that have no effect."""
    known = ("beam_fn_api", "use_runner_v2", "use_unified_worker")
    experiments = options.view_as(DebugOptions).experiments or ()
    experiments = [e for e in experiments if e not in known and not e.startswith(_WORKER_ACCELERATOR)]
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


def whole_number(name: str, value: Any, minimum: int) -> int | None:
    """Return the checked value of a flag, or None if it is not given."""
    if value is None:
        return None
    try:
        number = int(str(value))
    except ValueError:
        number = minimum - 1
    if number < minimum:
        raise OptionError(f"--{name}={value}: expected a whole number from {minimum}")
    return number


def borrowed_cpu_workers(options: PipelineOptions) -> int | None:
    """Return the number of workers that flags of other runners ask for."""
    direct = options.view_as(DirectOptions).direct_num_workers
    if direct and direct > 1:
        return direct
    given = options.view_as(PortableOptions).sdk_worker_parallelism  # a string if it comes from the command line
    parallelism = whole_number("sdk_worker_parallelism", given, minimum=0)
    # 1 is that flag's default, which the user need not have asked for; 0 lets the runner decide.
    return parallelism if parallelism and parallelism > 1 else None


def worker_accelerator(options: PipelineOptions) -> str:
    """Return the accelerator that Dataflow's users ask for, written as a resource hint; empty if there is none."""
    given = options.view_as(DebugOptions).experiments or []
    given = [*given, *(options.view_as(GoogleCloudOptions).dataflow_service_options or [])]
    found = [each.removeprefix(_WORKER_ACCELERATOR) for each in given if each.startswith(_WORKER_ACCELERATOR)]
    if not found:
        return ""
    if parse_accelerator(found[-1]) is None:
        raise OptionError(f"{_WORKER_ACCELERATOR}{found[-1]}: expected a whole number as count")
    return found[-1]


def worker_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``given`` options of a pipeline as code in workers sees them."""
    plugins = [*(given.get("beam_plugins") or ()), *_plugins()]
    return {
        # Workers log at this process's levels, and keep side inputs from bundle to bundle.
        "default_sdk_harness_log_level": _level_name(logging.getLogger().getEffectiveLevel()),
        "sdk_harness_log_level_overrides": _logger_levels(),
        "max_cache_memory_usage_mb": _CACHE_MB,
        # A value that JSON can't express would not be the same object in a worker anyway.
        **{name: value for name, value in given.items() if _is_json(value)},
        **({"beam_plugins": list(dict.fromkeys(plugins))} if plugins else {}),
    }


def _plugins() -> list[str]:
    """Return the classes of plugins, such as file systems, whose modules workers import: all but Beam's and local ones.

    A worker defines the classes of the user's script from their pickled form.
    """
    paths = BeamPlugin.get_all_plugin_paths()
    return [path for path in paths if not path.startswith(("apache_beam.", "__main__.")) and "<" not in path]


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _level_name(level: int) -> str:
    """Return the name of ``level``, or of the next lower level that Beam knows."""
    known = (logging.CRITICAL, logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG)
    return logging.getLevelName(next((k for k in known if k <= level), logging.DEBUG))


def _logger_levels() -> dict[str, str]:
    """Return the levels that the user set for single loggers."""
    loggers = logging.root.manager.loggerDict.items()
    return {
        name: _level_name(logger.level)
        for name, logger in loggers
        if isinstance(logger, logging.Logger) and logger.level and not name.startswith("apache_beam.runners.worker")
    }
