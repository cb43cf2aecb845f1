"""The runner's options: its own flags, checked, and what it takes from the flags of other runners."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from apache_beam.options.pipeline_options import (
    DebugOptions,
    GoogleCloudOptions,
    PipelineOptions,
)

from luminosity._shared.flags import RUNNER_FLAGS
from luminosity._shared.record_places import parse_place
from luminosity._shared.text import parse_size, printable, shorten
from luminosity.core import machine_ram_bytes
from luminosity.engine.beam_options import (
    borrowed_cpu_workers,
    warn_of_ignored,
    whole_number,
    worker_accelerator,
    worker_options,
)
from luminosity.errors import OptionError
from luminosity.runner_options import LuminosityOptions
from luminosity.runs.run_ids import run_to_store

__all__ = ["EngineConfig", "check_ray_address", "job_name", "of_pool"]

_BUDGET_PART = 4  # the default memory budget is RAM divided by this: user code needs most of it
_COPY_LEASE_S = 60.0  # a run outlasts shorter outages; another machine waits half as long again
_STOP_TIMEOUT_S = 30.0  # most bundles take a second, those of slow models some more
_LEAST_LEASE_S = 1.0  # it is renewed six times within it
_LEAST_INTERVAL_S = 0.01  # a checkpoint takes some milliseconds
_KEPT_STATES = 2  # one more than is needed: the newest may be damaged as well
_LONGEST_INTERVAL_S = 3600.0  # beyond that it is most likely a mistake in the unit
_LEAST_TIMEOUT_S = 1.0  # workers are asked a few times within it; a busy machine answers slowly
_LONGEST_TIMEOUT_S = 24 * 3600.0
_FOR_CHECKPOINTS = (
    "checkpoint_copy",
    "restore_from",
    "savepoint",
    "copy_lease",
    "checkpoint_interval",
    "checkpoint_keep",
    "stop_timeout",
    "restart",
    "drop_state",
    "continue_from",
    "migrate",
)
_ABOUT_OLD_DATA = ("transform_name_mapping", "drop_state")  # nothing is left of it after --restart
_TIME = re.compile(r"(\d+\.?\d*|\.\d+)\s*(ms|s|m|h|)")
_HOST = re.compile(r"[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.%]+\]")  # a name, an IPv4 address, an IPv6 address in brackets
_UNITS_S = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}
_MOST_JOB = 200  # characters of --job_name, which is a label of metrics
_IDLE_S = 60.0  # a model takes as long to load: shorter pauses are not worth a new start
_ONLY_ON_CLUSTERS = ("max_workers", "min_workers", "idle_timeout")
_LEAST_BUDGET_BYTES = 1_000_000  # a budget below one block of data would spill everything


@dataclass(frozen=True)
class EngineConfig:
    """The checked values of all flags of one run."""

    cpu_workers: int | None
    accelerators: int | None
    missing_resources: str
    progress: str
    worker_start: str
    threads_per_worker: int
    memory_budget: int
    min_workers: dict[str, int] = field(default_factory=dict[str, int])  # by pool; "" for each that has no other
    max_workers: dict[str, int] = field(default_factory=dict[str, int])
    idle_timeout: float = _IDLE_S  # after which a worker without work ends, on a cluster
    spill_dir: str | None = None
    debug: bool = False
    save_failed: str | None = None
    dead_letters: str | None = None  # a folder for elements at which steps fail
    late_elements: str | None = None  # a folder for elements that groupings drop
    skip_record: tuple[str, ...] = ()  # places of records that sources of Kafka leave out
    element_timeout: float | None = None  # in seconds; None: elements may take as long as they like
    when_busy: str = "share"  # what to do if other runs hold what steps ask for
    run_dir: str | None = None
    manifest: str = "quick"  # how much digests read, or "off"
    telemetry: str = "off"  # where traces and metrics go
    checkpoint_dir: str | None = None
    checkpoint_run: str = ""  # the identity that the pipeline's steps have, to be stored if a new run begins
    checkpoint_copy: str | None = None  # where the copy of the checkpoint lies
    restore_from: str | None = None  # the copy with which an empty folder begins
    savepoint: str | None = None  # the folder of the savepoint with which an empty folder begins
    copy_lease: float = _COPY_LEASE_S
    checkpoint_interval: float | None = None  # in seconds; None: as fits the pipeline
    checkpoint_keep: int = _KEPT_STATES
    stop_timeout: float = _STOP_TIMEOUT_S
    restart: bool = False
    migrate: str | None = None  # the function that changes stored state, as MODULE:FUNCTION
    continue_from: str | None = None  # the checkpoint folder of a drained run
    renamed_steps: dict[str, str] = field(default_factory=dict[str, str])  # --transform_name_mapping, old → new
    drop_state: tuple[str, ...] = ()
    pools: str = "hints"  # whose hints decide on pools: see resources/fitting.py
    hints_file: str | None = None  # --hints, for fitted pools
    worker_accelerator: str = ""  # the accelerator of models, written as a resource hint
    ray_address: str | None = None  # auto, local or HOST:PORT of a Ray cluster; None: this machine
    worker_options: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)
    job_name: str = ""  # what the run is called; empty: by its script and the folder of the script

    @classmethod
    def of(cls, options: PipelineOptions) -> EngineConfig:
        """Check a pipeline's options. Raises :class:`OptionError` and warns about flags that have no effect here."""
        ours = options.view_as(LuminosityOptions)
        given = options.get_all_options(drop_default=True, retain_unknown_options=True)
        cpu_workers = whole_number("cpu_workers", ours.cpu_workers, minimum=1)
        if cpu_workers is None:
            cpu_workers = borrowed_cpu_workers(options)
        threads = options.view_as(DebugOptions).number_of_worker_harness_threads
        config = cls(
            cpu_workers=cpu_workers,
            accelerators=whole_number("accelerators", ours.accelerators, minimum=0),
            missing_resources=_choice("missing_resources", ours.missing_resources),
            when_busy=_choice("when_busy", ours.when_busy),
            progress=_choice("progress", ours.progress),
            worker_start=_choice("worker_start", ours.worker_start),
            memory_budget=_memory_budget(ours.memory_budget),
            spill_dir=_folder("spill_dir", ours.spill_dir),
            threads_per_worker=whole_number("number_of_worker_harness_threads", threads, minimum=1) or 1,
            debug=ours.debug,
            element_timeout=_element_timeout(ours),
            save_failed=_new_file("save_failed", ours.save_failed),
            dead_letters=_dead_letters(ours),
            late_elements=_folder("late_elements", ours.late_elements),
            skip_record=_places(ours.skip_record or ()),
            run_dir=ours.run_dir,
            manifest=_choice("manifest", ours.manifest),
            telemetry=_choice("telemetry", ours.telemetry),
            **_checkpoint(options),
            **_pools(ours),
            **_elastic(ours),
            worker_accelerator=worker_accelerator(options),
            ray_address=_ray_address(ours),
            worker_options=worker_options(given),
            job_name=job_name(options),
        )
        warn_of_ignored(options, given, is_cluster=config.ray_address is not None)
        return config


def job_name(options: PipelineOptions) -> str:
    """Return ``--job_name``, bounded, or an empty string: from the pipeline's options, or else the command line.

    >>> job_name(PipelineOptions(job_name="nightly"))
    'nightly'
    """
    given = options.view_as(GoogleCloudOptions).job_name
    if not given:  # the script may pass no options to its pipeline
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--job_name", nargs="?")
        given = parser.parse_known_args(sys.argv[1:])[0].job_name
    return shorten(printable(str(given or "")).strip(), _MOST_JOB)


def _choice(name: str, value: Any) -> str:
    allowed = next(flag.metavar.split("|") for flag in RUNNER_FLAGS if flag.name == name)
    if value not in allowed:
        raise OptionError(f"--{name}={value}: expected one of {', '.join(allowed)}")
    return value


def _only_one(first: str, second: str, reason: str = "", *, fix: str) -> OptionError:
    return OptionError(f"{first} and {second}: expected only one of them{reason}", fix=fix)


def _pools(ours: LuminosityOptions) -> dict[str, Any]:
    """Return the checked options about hints. The file is read when the pipeline, whose steps it names, is known."""
    pools = _choice("pools", ours.pools)
    if pools == "fitted" and not ours.hints:
        raise OptionError(
            "--pools=fitted: found no --hints, expected a file with them",
            fix="add --hints=FILE; `lum advise RUN --write FILE` writes one",
        )
    if ours.hints and pools != "fitted":
        raise OptionError(f"--hints={ours.hints}: found --pools={pools}, expected fitted", fix="add --pools=fitted")
    if ours.debug and pools != "hints":
        raise _only_one("--debug", f"--pools={pools}", fix="debug without --pools")
    return {"pools": pools, "hints_file": ours.hints or None}


def _elastic(ours: LuminosityOptions) -> dict[str, Any]:
    """Return the checked options about pools that grow and shrink. The pools that they name are known later."""
    if ours.ray_address is None:
        if given := [f"--{name}" for name in _ONLY_ON_CLUSTERS if getattr(ours, name)]:
            raise OptionError(
                f"{', '.join(given)}: found no --ray_address, expected one: on one machine, pools have fixed sizes",
                fix="use --cpu_workers and --accelerators there",
            )
        return {}
    least = _by_pool("min_workers", ours.min_workers or (), minimum=0)
    most = _by_pool("max_workers", ours.max_workers or (), minimum=1)
    for pool, count in least.items():
        if (limit := of_pool(most, pool)) is not None and count > limit:
            raise OptionError(
                f"--min_workers={f'{pool}=' if pool else ''}{count}: found --max_workers={limit} for these pools, "
                f"expected at most {limit}"
            )
    timeout = ours.idle_timeout
    idle = _IDLE_S if timeout is None else _seconds("idle_timeout", timeout, _LEAST_TIMEOUT_S, _LONGEST_TIMEOUT_S)
    return {"min_workers": least, "max_workers": most, "idle_timeout": idle}


def _by_pool(name: str, given: Iterable[str], minimum: int) -> dict[str, int]:
    """Return numbers by the pool that they are for; an empty name stands for all others."""
    found: dict[str, int] = {}
    for text in given:
        pool, _, number = str(text).rpartition("=")  # the name of a pool may have one, such as "cpu ram=8GiB"
        if not number.isdecimal() or int(number) < minimum:
            raise OptionError(f"--{name}={text}: expected a whole number from {minimum}, or POOL=N such as device=4")
        found[pool.strip()] = int(number)
    return found


def of_pool(given: Mapping[str, int], name: str) -> int | None:
    """Return the number that an option gives for a pool: by its name, the beginning of its name, or for all pools.

    >>> given = {"": 8, "device": 4, "device T4": 2}
    >>> of_pool(given, "cpu"), of_pool(given, "device x2"), of_pool(given, "device T4"), of_pool({}, "cpu")
    (8, 4, 2, None)
    """
    best = max((each for each in given if name.startswith(each)), key=len, default=None)
    return None if best is None else given[best]


def _ray_address(ours: LuminosityOptions) -> str | None:
    """Return the address of a Ray cluster. Refuses the options that only make sense on this machine."""
    given = ours.ray_address
    if given is None:
        return None
    address = check_ray_address(f"--ray_address={given}", str(given))
    if ours.debug:
        reason = ", since --debug runs all steps in this process"
        raise _only_one("--debug", "--ray_address", reason, fix="debug without --ray_address")
    if ours.worker_start != "auto":
        reason = ", since the agents of nodes start the workers of a cluster"
        raise _only_one(f"--worker_start={ours.worker_start}", "--ray_address", reason, fix="leave out --worker_start")
    if ours.when_busy != "share":
        reason = "; on a cluster, workers wait in Ray's queue until there is room for them"
        raise _only_one(f"--when_busy={ours.when_busy}", "--ray_address", reason, fix="leave out --when_busy")
    return address


def check_ray_address(found: str, address: str) -> str:
    """Return ``address`` if it can be one of a Ray cluster. ``found`` is what the user wrote, for the error."""
    address = address.strip()
    if address in ("auto", "local"):
        return address
    if address.startswith("ray://"):
        raise OptionError(
            f"{found}: found an address of the Ray client, expected auto or HOST:PORT of the cluster's head; the "
            "process that runs the pipeline must be on a node of the cluster",
            fix="run the script on a node with --ray_address=auto, or submit it with `ray job submit`",
        )
    host, _, port = address.rpartition(":")
    if not _HOST.fullmatch(host) or not port.isdigit() or not 0 < int(port) < 65536:
        raise OptionError(
            f"{found}: expected auto, local, or HOST:PORT such as 10.0.0.1:6379",
            fix="`ray start` on the head prints the address; auto finds it on a node of the cluster",
        )
    return address


def _checkpoint(options: PipelineOptions) -> dict[str, Any]:
    """Return the checked options about checkpoints."""
    ours = options.view_as(LuminosityOptions)
    mapping = _renamed_steps(options)
    folder = ours.checkpoint_dir
    if not folder:
        if given := [f"--{name}" for name in _FOR_CHECKPOINTS if getattr(ours, name)]:
            raise OptionError(
                f"{', '.join(given)}: found no --checkpoint_dir, expected one", fix="add --checkpoint_dir=DIR"
            )
        return {}
    if "://" in str(folder):
        raise OptionError(
            f"--checkpoint_dir={folder}: found a URL, expected a folder on a local or mounted disk",
            fix="mount it, and pass the folder",
        )
    if ours.debug:
        raise _only_one("--debug", "--checkpoint_dir", fix="debug without --checkpoint_dir")
    if ours.spill_dir:
        fix = "leave out --spill_dir: a run with checkpoints spills into its checkpoint folder"
        raise _only_one("--spill_dir", "--checkpoint_dir", fix=fix)
    about_old = {"transform_name_mapping": mapping, "drop_state": ours.drop_state}
    if ours.restart and (given := [f"--{name}" for name in _ABOUT_OLD_DATA if about_old[name]]):
        raise _only_one("--restart", given[0], fix=f"leave out {given[0]}")
    if ours.continue_from and os.path.realpath(ours.continue_from) == os.path.realpath(folder):
        raise OptionError(
            f"--continue_from={ours.continue_from}: found the folder of --checkpoint_dir, expected two folders",
            fix="choose a new --checkpoint_dir for the new run",
        )
    if ours.restart and ours.restore_from:
        raise _only_one("--restart", "--restore_from", fix="leave out --restart: a restore begins with an empty folder")
    if ours.savepoint:
        for name in ("restart", "restore_from", "continue_from"):
            if getattr(ours, name):
                fix = f"leave out --{name}: a run begins with a savepoint in a new --checkpoint_dir"
                raise _only_one("--savepoint", f"--{name}", fix=fix)
    if ours.copy_lease and not (ours.checkpoint_copy or ours.restore_from):
        raise OptionError(
            f"--copy_lease={ours.copy_lease}: found no --checkpoint_copy, expected one", fix="add --checkpoint_copy=URL"
        )
    for name in ("checkpoint_copy", "restore_from"):
        if (place := getattr(ours, name)) and _is_inside(str(place), str(folder)):
            raise OptionError(
                f"--{name}={place}: found a place in --checkpoint_dir={folder}, expected one that outlives it",
                fix="name a folder on another disk, or a URL such as s3://bucket/folder",
            )
    interval = ours.checkpoint_interval
    keep = whole_number("checkpoint_keep", ours.checkpoint_keep, minimum=0)
    return {
        "checkpoint_dir": _folder("checkpoint_dir", folder),
        "checkpoint_run": run_to_store(options) if folder else "",
        "checkpoint_copy": ours.checkpoint_copy or None,
        "restore_from": ours.restore_from or None,
        "savepoint": os.path.abspath(os.path.expanduser(ours.savepoint)) if ours.savepoint else None,
        "copy_lease": _seconds("copy_lease", ours.copy_lease, _LEAST_LEASE_S) if ours.copy_lease else _COPY_LEASE_S,
        "checkpoint_interval": _seconds("checkpoint_interval", interval, _LEAST_INTERVAL_S) if interval else None,
        "checkpoint_keep": _KEPT_STATES if keep is None else keep,
        "stop_timeout": _seconds("stop_timeout", ours.stop_timeout, 0.0) if ours.stop_timeout else _STOP_TIMEOUT_S,
        "restart": ours.restart,
        "migrate": ours.migrate,
        "continue_from": _folder("continue_from", ours.continue_from) if ours.continue_from else None,
        "renamed_steps": mapping,
        "drop_state": tuple(ours.drop_state or ()),
    }


def _is_inside(place: str, folder: str) -> bool:
    if "://" in place:
        return False
    place, folder = (os.path.realpath(os.path.expanduser(each)) for each in (place, folder))
    return os.path.commonpath([place, folder]) == folder


def _renamed_steps(options: PipelineOptions) -> dict[str, str]:
    """Return ``--transform_name_mapping``. Beam has read its JSON, unless it comes from the command line of ``lum``."""
    name = "transform_name_mapping"
    given: Any = options.view_as(GoogleCloudOptions).transform_name_mapping
    if given is None and (default := LuminosityOptions.defaults.get(name)) is not None:
        try:
            given = json.loads(str(default))
        except ValueError as error:
            raise OptionError(f"--{name}={default}: {error}; expected JSON") from error
    if given is None:
        return {}
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        example = json.dumps({"old": "new"})
        raise OptionError(f"--{name}: found {json.dumps(given)}, expected the old and new names of steps: {example}")
    return given


def _element_timeout(ours: LuminosityOptions) -> float | None:
    if ours.element_timeout is None:
        return None
    if ours.debug:
        timeout = f"--element_timeout={ours.element_timeout}"
        reason = ", since --debug has no worker that could be ended"
        raise _only_one("--debug", timeout, reason, fix="debug without --element_timeout")
    return _seconds("element_timeout", ours.element_timeout, _LEAST_TIMEOUT_S, _LONGEST_TIMEOUT_S)


def _seconds(name: str, value: Any, least: float, longest: float = _LONGEST_INTERVAL_S) -> float:
    """Return a time in seconds."""
    found = _TIME.fullmatch(str(value).strip().lower())
    seconds = float(found[1]) * _UNITS_S[found[2]] if found is not None else -1.0
    if not least <= seconds <= longest:
        shortest = f"from {f'{least:g}s' if least >= 1 else f'{least * 1000:g}ms'} " if least else ""
        examples = "50ms, 10s or 2m" if least < 1 else "10s, 2m or 1h"
        raise OptionError(f"--{name}={value}: expected a time {shortest}up to {longest / 3600:g}h, such as {examples}")
    return seconds


def _memory_budget(value: Any) -> int:
    if value is None:
        return machine_ram_bytes() // _BUDGET_PART
    size = parse_size(str(value))
    if size is None or size < _LEAST_BUDGET_BYTES:
        raise OptionError(f"--memory_budget={value}: expected a size from 1MB up, such as 512MB, 4GB or 2GiB")
    return size


def _dead_letters(ours: LuminosityOptions) -> str | None:
    if ours.dead_letters and ours.save_failed:
        raise _only_one("--save_failed", "--dead_letters", fix="a dead letter has the element: leave out --save_failed")
    return _folder("dead_letters", ours.dead_letters)


def _places(given: Iterable[str]) -> tuple[str, ...]:
    for text in given:
        if parse_place(text) is None:
            raise OptionError(f"--skip_record={text}: expected TOPIC[PARTITION]@OFFSET, such as reviews[3]@1204")
    return tuple(dict.fromkeys(text.strip() for text in given))


def _folder(name: str, value: Any) -> str | None:
    """Return the absolute path of a folder that is writable or can be created."""
    if not value:
        return None
    path = present = os.path.abspath(os.path.expanduser(str(value)))
    while not os.path.exists(present):
        present = os.path.dirname(present)
    if not os.path.isdir(present):
        raise OptionError(f"--{name}={value}: found a file at {present}, expected a folder")
    if not os.access(present, os.W_OK | os.X_OK):
        raise OptionError(f"--{name}={value}: {present} is not writable, expected a writable folder")
    return path


def _new_file(name: str, value: str | None) -> str | None:
    """Return the absolute path of a file that can be written. Checked before the run, not when the file is needed."""
    if value is None:
        return None
    path = os.path.abspath(value)
    if os.path.isdir(path):
        raise OptionError(f"--{name}={value}: found a folder, expected a file")
    if not os.access(os.path.dirname(path), os.W_OK):
        raise OptionError(f"--{name}={value}: expected a file in a writable folder")
    return path
