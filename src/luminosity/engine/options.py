"""The engine's flags, and what becomes of flags that belong to other runners."""

from __future__ import annotations

import argparse
import json
import logging
from dataclasses import dataclass, field
from typing import Any, ClassVar

from apache_beam.options.pipeline_options import (
    DebugOptions,
    DirectOptions,
    PipelineOptions,
    PortableOptions,
    SetupOptions,
    WorkerOptions,
)

from luminosity.errors import OptionError

_LOGGER = logging.getLogger("luminosity")

_MISSING_ACCELERATOR = ("cpu", "fail")
_PROGRESS = ("auto", "plain", "off")
_CACHE_MB = 100
_WORKER_START = ("auto", "fork", "spawn")


class LuminosityOptions(PipelineOptions):
    """Flags of ``LuminosityRunner``.

    >>> options = PipelineOptions(["--cpu_workers=4"]).view_as(LuminosityOptions)
    >>> options.cpu_workers
    '4'
    """

    # What holds where a pipeline's own options say nothing; the command line of `lum` changes it.
    defaults: ClassVar[dict[str, str | None]] = {
        "cpu_workers": None,
        "accelerators": None,
        "missing_accelerator": "cpu",
        "progress": "auto",
        "worker_start": "auto",
        "run_dir": None,
    }

    @classmethod
    def _add_argparse_args(cls, parser: argparse.ArgumentParser) -> None:
        # Values are checked by EngineConfig, whose messages say more than argparse's.
        parser.add_argument(
            "--cpu_workers",
            default=cls.defaults["cpu_workers"],
            help="CPU worker processes, summed over all pools (default: cores).",
        )
        parser.add_argument(
            "--accelerators",
            default=cls.defaults["accelerators"],
            help="Accelerators to use (default: those detected). More than there are declares them, "
            "so that pools can be tried without any.",
        )
        parser.add_argument(
            "--missing_accelerator",
            default=cls.defaults["missing_accelerator"],
            help="What to do when a step asks for an accelerator that is not there: run it on the CPU with a "
            "warning (cpu, the default) or refuse the pipeline (fail).",
        )
        parser.add_argument(
            "--progress",
            default=cls.defaults["progress"],
            help="auto (the default): a live view on a terminal, a line now and then elsewhere; plain: lines; off.",
        )
        parser.add_argument(
            "--worker_start",
            default=cls.defaults["worker_start"],
            help="How worker processes start: fork (quick), spawn (where forking is unsafe), or auto (the default).",
        )
        parser.add_argument(
            "--run_dir",
            default=cls.defaults["run_dir"],
            help="Where this run is recorded for `lum runs` (default: the environment's LUMINOSITY_RUN_DIR, else "
            "~/.luminosity/runs), or off.",
        )


@dataclass(frozen=True)
class EngineConfig:
    """The flags, checked once."""

    cpu_workers: int | None
    accelerators: int | None
    missing_accelerator: str
    progress: str
    worker_start: str
    threads_per_worker: int
    run_dir: str | None = None
    worker_options: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)

    @classmethod
    def of(cls, options: PipelineOptions) -> EngineConfig:
        ours = options.view_as(LuminosityOptions)
        cpu_workers = _whole_number("cpu_workers", ours.cpu_workers, minimum=1)
        if cpu_workers is None:
            cpu_workers = _borrowed_cpu_workers(options)
        threads = options.view_as(DebugOptions).number_of_worker_harness_threads
        config = cls(
            cpu_workers=cpu_workers,
            accelerators=_whole_number("accelerators", ours.accelerators, minimum=0),
            missing_accelerator=_choice("missing_accelerator", ours.missing_accelerator, _MISSING_ACCELERATOR),
            progress=_choice("progress", ours.progress, _PROGRESS),
            worker_start=_choice("worker_start", ours.worker_start, _WORKER_START),
            threads_per_worker=_whole_number("number_of_worker_harness_threads", threads, minimum=1) or 1,
            run_dir=ours.run_dir,
            worker_options=_worker_options(options),
        )
        _warn_of_ignored(options)
        return config


def _whole_number(name: str, value: Any, minimum: int) -> int | None:
    if value is None:
        return None
    try:
        number = int(str(value))
    except ValueError:
        number = minimum - 1
    if number < minimum:
        raise OptionError(f"--{name}={value}: expected a whole number from {minimum}")
    return number


def _choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise OptionError(f"--{name}={value}: expected one of {', '.join(allowed)}")
    return value


def _borrowed_cpu_workers(options: PipelineOptions) -> int | None:
    """What other runners' flags say about the number of workers."""
    direct = options.view_as(DirectOptions).direct_num_workers
    if direct and direct > 1:
        return direct
    given = options.view_as(PortableOptions).sdk_worker_parallelism  # a string where it comes from the command line
    parallelism = _whole_number("sdk_worker_parallelism", given, minimum=0)
    # Its default is 1, which is no wish; 0 lets the runner decide.
    return parallelism if parallelism and parallelism > 1 else None


def _worker_options(options: PipelineOptions) -> dict[str, Any]:
    """The pipeline's options as the workers' own code sees them."""
    given = options.get_all_options(drop_default=True, retain_unknown_options=True)
    return {
        # Workers log what would be seen here, and keep side inputs from bundle to bundle.
        "default_sdk_harness_log_level": _level_name(logging.getLogger().getEffectiveLevel()),
        "sdk_harness_log_level_overrides": _logger_levels(),
        "max_cache_memory_usage_mb": _CACHE_MB,
        # What is not JSON would not be the same thing in a worker, either.
        **{name: value for name, value in given.items() if _is_json(value)},
    }


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _level_name(level: int) -> str:
    """Of a level in between, the next lower one that Beam knows."""
    known = (logging.CRITICAL, logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG)
    return logging.getLevelName(next((k for k in known if k <= level), logging.DEBUG))


def _logger_levels() -> dict[str, str]:
    """The levels that the user set for single loggers."""
    loggers = logging.root.manager.loggerDict.items()
    return {
        name: _level_name(logger.level)
        for name, logger in loggers
        if isinstance(logger, logging.Logger) and logger.level and not name.startswith("apache_beam.runners.worker")
    }


def _warn_of_ignored(options: PipelineOptions) -> None:
    """Name, in one warning, the flags given that mean nothing on this machine."""
    setup = options.view_as(SetupOptions)
    ignored: dict[str, object] = {
        "setup_file": setup.setup_file,
        "requirements_file": setup.requirements_file,
        "extra_packages": setup.extra_packages,
        "direct_running_mode": options.view_as(DirectOptions).direct_running_mode != "in_memory",
        "environment_type": options.view_as(PortableOptions).environment_type,
        "num_workers": options.view_as(WorkerOptions).num_workers,
        "machine_type": options.view_as(WorkerOptions).machine_type,
    }
    known = ("beam_fn_api", "use_runner_v2", "use_unified_worker")
    experiments = [e for e in options.view_as(DebugOptions).experiments or () if e not in known]
    names = [f"--{name}" for name, value in ignored.items() if value]
    if experiments:
        _LOGGER.info("experiments handed to the workers: %s", ", ".join(experiments))
    if names:
        _LOGGER.warning(
            "%s: no meaning here. Workers run in this Python environment; what they need is what is installed in it.",
            ", ".join(names),
        )
