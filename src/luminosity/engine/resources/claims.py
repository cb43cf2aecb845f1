"""Claims: what the runs of this user hold on this machine, so that a run does not take it a second time in silence.

A claim is a small file in a private folder. It names the process of its run, the accelerators that the run uses, and
the RAM that its steps ask for with ``min_ram``. Runs whose steps ask for neither don't look at the folder at all. The
claim of a killed run counts no more, and the next run removes it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from luminosity._shared.shared_files import locked, replace_file
from luminosity._shared.text import format_bytes
from luminosity.engine.resources.hints import Needs
from luminosity.engine.resources.machine import Machine
from luminosity.engine.resources.pools import Assignment, Pool
from luminosity.errors import ResourcesBusy
from luminosity.runs import records

__all__ = ["Claim", "Held", "MakePools"]

_LOGGER = logging.getLogger(__name__)

_FOLDER = "lum-claims-"  # with the user's number
_SHARED_MEMORY = Path("/dev/shm")  # the same for a terminal, a service and cron; empty after a restart of the machine
_LOCK = "changes.lock"
_LOCK_TIMEOUT_S = 30.0  # whoever holds it reads some small files and sizes pools
_LOOK_EVERY_S = 0.5  # while a run waits for others
_DECLARED = "declared:"  # devices that only --accelerators has declared: nothing is there to be shared
_MOST_NAMED = 3  # other runs in one message
_numbers = itertools.count()


@dataclass(frozen=True)
class Held:
    """What one run holds."""

    name: str  # of its script
    pid: int
    devices: tuple[str, ...] = ()
    ram: int = 0  # bytes that its steps ask for

    def __str__(self) -> str:
        """Say who holds what.

        >>> str(Held("reviews.py", 12, ("gpu:0",), 12 << 30))
        'reviews.py (process 12) holds gpu:0 and 12.9 GB of RAM'
        """
        what = _and([*self.devices, *([f"{format_bytes(self.ram)} of RAM"] if self.ram else [])])
        return f"{self.name} (process {self.pid}) holds {what}"


class MakePools(Protocol):
    """Makes the pools of a run from a machine."""

    def __call__(self, machine: Machine, *, is_quiet: bool = False) -> dict[str, Assignment]:
        """Return the pool of every stage, by the stage's id; warn of nothing if ``is_quiet``."""
        ...


class Claim:
    """The claim of one run, from before its workers start to its end. Its owner calls :meth:`release`."""

    def __init__(self, name: str, folder: Path | None = None) -> None:
        """Make a claim that holds nothing yet. ``name`` is that of the run's script."""
        self._name = name
        self._folder = folder
        self._path: Path | None = None

    def take(
        self, needs: Mapping[str, Needs], machine: Machine, mode: str, make_pools: MakePools
    ) -> dict[str, Assignment]:
        """Return the pools that ``make_pools`` makes from what is left of the machine, and claim what they use.

        ``needs`` are those of each stage, by its id. If less is left than one worker of each kind needs, this waits for
        the other runs, goes on beside them, or raises :class:`ResourcesBusy`: ``mode`` is ``wait``, ``share`` or
        ``fail``. A second call, of a run that is planned again, never waits.
        """
        least = _Least.of(needs.values(), machine)
        if not (least.devices or least.ram) or (folder := self._open()) is None:
            return make_pools(machine)
        told: list[Held] = []
        while True:
            with _changing(folder):
                others = [each for each in self._others(folder) if least.meets(each)]
                left = _left(machine, others)
                fits = len(left.devices) >= least.devices and left.ram_bytes >= least.ram
                if fits or mode == "share" or self._path is not None:
                    assignments = self._beside(make_pools, machine, left, least, others)
                    self._write(folder, needs, assignments)
                    return assignments
            if mode == "fail":
                raise ResourcesBusy(
                    f"{_listed(others)}; this run needs {least}, and {_described(left, least)} is left",
                    fix="wait until they have ended, or pass --when_busy=wait or --when_busy=share",
                )
            if others != told:
                told = others
                _LOGGER.warning(
                    "this run waits: %s; it needs %s. Ctrl-C ends it, --when_busy=share goes on beside others",
                    _listed(others),
                    least,
                )
            time.sleep(_LOOK_EVERY_S)

    def release(self) -> None:
        """Remove the claim. Does nothing if there is none."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None

    def _open(self) -> Path | None:
        """Return the folder of claims, or None if this user can't have one."""
        folder = self._folder or _default_folder()
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            status = folder.lstat()
            is_private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
            reason = "" if is_private else "found something else than a private folder of this user"
        except OSError as error:
            reason = error.strerror or str(error)
        if reason:
            _LOGGER.warning("other runs don't learn what this run uses: %s: %s", folder, reason)
            return None
        return folder

    def _others(self, folder: Path) -> list[Held]:
        """Return what other runs hold. Removes the claims of runs that were killed."""
        found: list[Held] = []
        for path in sorted(folder.glob("*.json")):
            if path == self._path:
                continue
            try:
                content: dict[str, Any] = json.loads(path.read_text())
                held = Held(content["name"], content["pid"], tuple(content["devices"]), content["ram"])
                is_alive = records.is_alive(content["process"], path)
            except FileNotFoundError:
                continue  # its run has just ended
            except (OSError, ValueError, KeyError, TypeError) as error:
                _LOGGER.debug("%s is not a claim of this version: %r", path, error)
                held, is_alive = None, _is_of_a_process(path)
            if not is_alive:
                path.unlink(missing_ok=True)
            elif held is not None:
                found.append(held)
        return found

    def _beside(
        self, make_pools: MakePools, machine: Machine, left: Machine, least: _Least, others: list[Held]
    ) -> dict[str, Assignment]:
        """Make the pools beside others, and say so if it gets less than it would alone, or the same a second time."""
        if not others:
            return make_pools(machine)
        alone = make_pools(machine, is_quiet=True)
        is_twice = [
            *([", ".join(machine.devices)] if len(left.devices) < least.devices else []),
            *(["RAM"] if left.ram_bytes < least.ram else []),
        ]
        used = replace(
            left,
            devices=left.devices if len(left.devices) >= least.devices else machine.devices,
            ram_bytes=max(left.ram_bytes, least.ram),
        )
        assignments = make_pools(used)
        if is_twice:
            _LOGGER.warning(
                "%s; this run uses the same %s beside it, and both may run out of memory: --when_busy=wait waits, "
                "--when_busy=fail refuses",
                _listed(others),
                " and ".join(is_twice),
            )
        elif _sizes(alone) != _sizes(assignments):
            _LOGGER.warning("%s; this run takes what is left: %s", _listed(others), _described(used, least))
        return assignments

    def _write(self, folder: Path, needs: Mapping[str, Needs], assignments: Mapping[str, Assignment]) -> None:
        pools = _pools(assignments)
        devices = dict.fromkeys(d for pool in pools for group in pool.device_groups for d in group)
        asking = {id(assignments[stage_id].pool) for stage_id, each in needs.items() if each.min_ram_bytes}
        ram = sum((pool.workers + pool.borrowed) * pool.ram_per_worker for pool in pools if id(pool) in asking)
        held = Held(self._name, os.getpid(), tuple(d for d in devices if not d.startswith(_DECLARED)), ram)
        path = self._path or folder / f"{os.getpid()}-{next(_numbers)}.json"
        replace_file(path, json.dumps({**asdict(held), "process": records.this_process()}))
        self._path = path


@dataclass(frozen=True)
class _Least:
    """What a run needs at least: one worker of each kind of step."""

    devices: int
    ram: int

    @classmethod
    def of(cls, needs: Iterable[Needs], machine: Machine) -> _Least:
        """Return what the steps' hints ask for, as far as the machine has it. Declared devices don't count."""
        devices = 0
        ram: dict[object, int] = {}
        for each in needs:
            count = each.accelerator_count if each.accelerator_count <= len(machine.devices) else 0
            devices = max(devices, count)
            kind = count or (each.min_ram_bytes, each.cpu_count, each.max_active_bundles)
            ram[kind] = max(ram.get(kind, 0), each.min_ram_bytes)
        is_real = any(not device.startswith(_DECLARED) for device in machine.devices)
        return cls(devices if is_real else 0, min(sum(ram.values()), machine.ram_bytes))

    def meets(self, other: Held) -> bool:
        """Return whether another run holds something of what this run needs."""
        return bool((self.devices and other.devices) or (self.ram and other.ram))

    def __str__(self) -> str:
        return _and(
            [
                *([f"{self.devices} accelerator{'s' if self.devices > 1 else ''}"] if self.devices else []),
                *([f"{format_bytes(self.ram)} of RAM"] if self.ram else []),
            ]
        )


def _default_folder() -> Path:
    """Return the folder of this user's claims: ``LUMINOSITY_CLAIM_DIR``, or one in memory."""
    if given := os.environ.get("LUMINOSITY_CLAIM_DIR"):
        return Path(given)
    root = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    return root / f"{_FOLDER}{os.geteuid()}"


def _is_of_a_process(path: Path) -> bool:
    """Return whether the process exists for which the file of a claim is named."""
    pid = path.name.partition("-")[0]
    try:
        os.kill(int(pid), 0)
    except (ValueError, OSError):
        return False
    return True


@contextlib.contextmanager
def _changing(folder: Path) -> Generator[None]:
    """Hold the lock of the folder."""
    descriptor = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with locked(descriptor, _LOCK_TIMEOUT_S):
            yield
    finally:
        os.close(descriptor)


def _left(machine: Machine, others: Iterable[Held]) -> Machine:
    """Return what other runs leave of a machine."""
    others = list(others)
    held = {device for each in others for device in each.devices}
    ram = machine.ram_bytes - sum(each.ram for each in others)
    return replace(machine, devices=tuple(d for d in machine.devices if d not in held), ram_bytes=max(0, ram))


def _pools(assignments: Mapping[str, Assignment]) -> list[Pool]:
    return list({id(each.pool): each.pool for each in assignments.values()}.values())


def _sizes(assignments: Mapping[str, Assignment]) -> list[tuple[object, ...]]:
    return [(pool.name, pool.workers, pool.device_groups) for pool in _pools(assignments)]


def _described(machine: Machine, least: _Least) -> str:
    parts = [*machine.devices] if least.devices else []
    if least.devices and not parts:
        parts = ["no accelerator"]
    return _and([*parts, *([f"{format_bytes(machine.ram_bytes)} of RAM"] if least.ram else [])])


def _listed(others: Sequence[Held]) -> str:
    more = len(others) - _MOST_NAMED
    return _and([*map(str, others[:_MOST_NAMED]), *([f"{more} more runs hold some"] if more > 0 else [])])


def _and(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
