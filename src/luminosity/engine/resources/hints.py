"""Resource hints: what a step asks for, read from its environment's proto."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_runner_api_pb2

from luminosity._shared.accelerators import parse_accelerator
from luminosity._shared.environment_hint import PYTHON_ENVIRONMENT_URN
from luminosity._shared.text import format_size
from luminosity.engine.resources.python_environments import folder_of, is_this_python
from luminosity.errors import UnsupportedPipeline
from luminosity.events import Resources

__all__ = [
    "REASON_URN",
    "Needs",
    "asks_about_accelerators",
    "describe_hints",
    "largest",
    "python_environment",
    "resources_asked",
    "with_accelerator",
]


_HINTS = common_urns.StandardResourceHints.Enum
REASON_URN = "luminosity:resources:accelerator_reason"  # why a step has an accelerator that its author did not ask for


@dataclass(frozen=True)
class Needs:
    """The resources that one worker needs to run a step; 0 or an empty string if there is no hint."""

    min_ram_bytes: int = 0
    cpu_count: int = 0
    accelerator_count: int = 0
    accelerator_type: str = ""
    max_active_bundles: int = 0
    python_environment: str = ""  # its path; empty for the environment of this process

    @classmethod
    def of(cls, environment: beam_runner_api_pb2.Environment) -> Needs:
        """Read the hints of an environment. Raises :class:`UnsupportedPipeline` for a count that is not a number."""
        hints = environment.resource_hints
        count, kind = _accelerator(hints.get(_HINTS.ACCELERATOR.urn, b"").decode())
        return cls(
            min_ram_bytes=int(hints.get(_HINTS.MIN_RAM_BYTES.urn, b"0")),
            cpu_count=int(hints.get(_HINTS.CPU_COUNT.urn, b"0")),
            accelerator_count=count,
            accelerator_type=kind,
            max_active_bundles=int(hints.get(_HINTS.MAX_ACTIVE_BUNDLES_PER_WORKER.urn, b"0")),
            python_environment=python_environment(environment),
        )


def python_environment(environment: beam_runner_api_pb2.Environment) -> str:
    """Return the path of the Python environment that a step asks for; empty if it is that of this process."""
    path = folder_of(os.fsdecode(environment.resource_hints.get(PYTHON_ENVIRONMENT_URN, b"")))
    return "" if not path or is_this_python(path) else path


def resources_asked(environment: beam_runner_api_pb2.Environment) -> Resources:
    """Return what the hints of an environment ask for, as events show it."""
    hints = environment.resource_hints
    return Resources(
        ram=int(hints.get(_HINTS.MIN_RAM_BYTES.urn, b"0")),
        cores=float(hints.get(_HINTS.CPU_COUNT.urn, b"0")),
        accelerator=hints.get(_HINTS.ACCELERATOR.urn, b"").decode(),
    )


def largest(asked: Iterable[Resources]) -> Resources:
    """Return what satisfies each of ``asked``: the most RAM, the most cores, and the first accelerator.

    >>> largest([Resources(ram=4), Resources(ram=2, cores=2.0), Resources(accelerator="type:any;count:1")])
    Resources(ram=4, cores=2.0, accelerator='type:any;count:1')
    """
    every = list(asked)
    return Resources(
        ram=max((each.ram for each in every), default=0),
        cores=max((each.cores for each in every), default=0.0),
        accelerator=next((each.accelerator for each in every if each.accelerator), ""),
    )


def _accelerator(hint: str) -> tuple[int, str]:
    """Return count and type. A count of 0 keeps a model that could use an accelerator on the CPU."""
    if not hint:
        return 0, ""
    found = parse_accelerator(hint)
    if found is None:
        raise UnsupportedPipeline(f"resource hint accelerator={hint!r}: expected a whole number as count")
    return found


def asks_about_accelerators(environment: beam_runner_api_pb2.Environment) -> bool:
    """Return whether the hints decide about accelerators: ask for some, or for none with ``count:0``."""
    return _HINTS.ACCELERATOR.urn in environment.resource_hints


def with_accelerator(
    environment: beam_runner_api_pb2.Environment, hint: str, reason: str, bundles: int
) -> beam_runner_api_pb2.Environment:
    """Return a copy of the environment with an accelerator, the reason for it, and the bundles that share a worker."""
    changed = beam_runner_api_pb2.Environment()
    changed.CopyFrom(environment)
    changed.resource_hints[_HINTS.ACCELERATOR.urn] = hint.encode()
    changed.resource_hints[REASON_URN] = reason.encode()
    limit = _HINTS.MAX_ACTIVE_BUNDLES_PER_WORKER.urn
    if bundles and limit not in changed.resource_hints:
        changed.resource_hints[limit] = str(bundles).encode()
    return changed


def describe_hints(environment: beam_runner_api_pb2.Environment) -> str:
    """Return the hints nearly as their author wrote them, or an empty string if there are none.

    >>> hints = {_HINTS.MIN_RAM_BYTES.urn: b"1073741824", "beam:resources:cpu_count:v1": b"2"}
    >>> describe_hints(beam_runner_api_pb2.Environment(resource_hints=hints))
    'cpu_count=2, min_ram=1GiB'
    """
    shown: dict[str, str] = {}
    reason = environment.resource_hints.get(REASON_URN, b"").decode()
    for urn, value in environment.resource_hints.items():
        if urn == REASON_URN:
            continue
        if urn == _HINTS.ACCELERATOR.urn and reason:
            shown["accelerator"] = f"{value.decode()} ({reason})"
        elif urn == _HINTS.MIN_RAM_BYTES.urn:
            shown["min_ram"] = format_size(int(value))
        else:
            parts = urn.split(":")  # beam:resources:accelerator:v1; other URNs are the user's own and shown whole
            shown[parts[2] if len(parts) == 4 else urn] = value.decode(errors="replace")
    return ", ".join(f"{name}={value}" for name, value in sorted(shown.items()))
