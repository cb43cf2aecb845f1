"""The engine's flags, and what becomes of flags that belong to other runners."""

from __future__ import annotations

import argparse
import json
import logging
import os
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

from luminosity._text import parse_size
from luminosity.core import machine_ram_bytes
from luminosity.errors import OptionError

_LOGGER = logging.getLogger("luminosity")

_MISSING_ACCELERATOR = ("cpu", "fail")
_PROGRESS = ("auto", "plain", "off")
_CACHE_MB = 100
_BUDGET_PART = 4  # of the machine's memory
_LEAST_BUDGET = 1_000_000
_WORKER_START = ("auto", "fork", "spawn")


class LuminosityOptions(PipelineOptions):
    """Flags of ``LuminosityRunner``.

    >>> options = PipelineOptions(["--cpu_workers=4"]).view_as(LuminosityOptions)
    >>> options.cpu_workers
    '4'
    """

    # What holds where a pipeline's own options say nothing; the command line of `lum` changes it.
    defaults: ClassVar[dict[str, str | bool | None]] = {
        "cpu_workers": None,
        "accelerators": None,
        "missing_accelerator": "cpu",
        "progress": "auto",
        "worker_start": "auto",
        "memory_budget": None,
        "spill_dir": None,
        "debug": False,
        "save_failed": None,
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
            "--memory_budget",
            default=cls.defaults["memory_budget"],
            help="Memory for data between steps, groupings, side inputs and state, such as 512MB or 4GB (default: a "
            "quarter of RAM). What is beyond it goes to disk.",
        )
        parser.add_argument(
            "--spill_dir",
            default=cls.defaults["spill_dir"],
            help="The folder for what is beyond the memory budget (default: a private one for temporary files).",
        )
        parser.add_argument(
            "--debug",
            default=cls.defaults["debug"],
            action="store_true",
            help="Run everything in this process, one bundle at a time, so that breakpoint() works; a failing step is "
            "tried once. Resource hints and the number of workers have no effect then.",
        )
        parser.add_argument(
            "--save_failed",
            default=cls.defaults["save_failed"],
            help="Save the element that fails the run in this file, for `lum replay FILE`.",
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
    memory_budget: int
    spill_dir: str | None = None
    debug: bool = False
    save_failed: str | None = None
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
            memory_budget=_memory_budget(ours.memory_budget),
            spill_dir=_folder("spill_dir", ours.spill_dir),
            threads_per_worker=_whole_number("number_of_worker_harness_threads", threads, minimum=1) or 1,
            debug=ours.debug,
            save_failed=_new_file("save_failed", ours.save_failed),
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


def _memory_budget(value: Any) -> int:
    if value is None:
        return machine_ram_bytes() // _BUDGET_PART
    size = parse_size(str(value))
    if size is None or size < _LEAST_BUDGET:
        raise OptionError(f"--memory_budget={value}: expected a size from 1MB up, such as 512MB, 4GB or 2GiB")
    return size


def _folder(name: str, value: Any) -> str | None:
    """A folder that can be written to, or be made, as an absolute path."""
    if not value:
        return None
    path = present = os.path.abspath(os.path.expanduser(str(value)))
    while not os.path.exists(present):
        present = os.path.dirname(present)
    if not os.path.isdir(present):
        raise OptionError(f"--{name}={value}: expected a folder; {present} is a file")
    if not os.access(present, os.W_OK | os.X_OK):
        raise OptionError(f"--{name}={value}: expected a folder that can be written to; {present} can't be")
    return path


def _new_file(name: str, value: str | None) -> str | None:
    """Found out now rather than when there is something to write."""
    if value is None:
        return None
    path = os.path.abspath(value)
    if os.path.isdir(path):
        raise OptionError(f"--{name}={value}: expected a file, found a folder")
    if not os.access(os.path.dirname(path), os.W_OK):
        raise OptionError(f"--{name}={value}: expected a file in a folder that can be written to")
    return path


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
