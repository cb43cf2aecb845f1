"""Resource hints: what a step asks for, and the types of accelerators in them, such as ``nvidia-tesla-t4``.

A cluster names types as ``T4``, the driver of this machine as ``Tesla T4``. The type of a device is unknown if only
``--accelerators`` declares it, or if it has no driver that tells its name; such a device stands for any one type.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_runner_api_pb2

from luminosity._shared.accelerators import parse_accelerator
from luminosity._shared.environment_hint import PYTHON_ENVIRONMENT_URN
from luminosity._shared.text import did_you_mean, format_size
from luminosity.engine.resources.machine import Node
from luminosity.engine.resources.python_environments import folder_of, is_this_python
from luminosity.errors import ResourcesExceeded, UnsupportedPipeline
from luminosity.events import Resources

__all__ = [
    "REASON_URN",
    "DevicesByType",
    "Needs",
    "asks_about_accelerators",
    "cluster_type",
    "describe_hints",
    "is_of_type",
    "largest",
    "python_environment",
    "resources_asked",
    "types_of",
    "with_accelerator",
]

_HINTS = common_urns.StandardResourceHints.Enum
REASON_URN = "luminosity:resources:accelerator_reason"  # why a step has an accelerator that its author did not ask for
_ANY = frozenset(["", "any", "gpu", "tpu"])  # a hint with one of these leaves the type open
_MAKERS = re.compile(r"^(nvidia|google|intel|amd|apple|aws|huawei)-")
_FAMILY = re.compile(r"^tesla-")
_VARIANT = re.compile(r"-(\d+gb?|mega|mega-\d+gb?|sxm\d?|pcie|nvl)$")  # what a cluster's name leaves out
_WORDS = re.compile(r"[a-z0-9.]+")
_MEMORY = re.compile(r"^(\d+)gb?$")
_NO_MODEL = frozenset(["nvidia", "tesla", "geforce", "google", "mega", "pcie", "nvl"])  # also what names of servers add
_OTHER_MAKERS = ("nvidia", "amd", "intel", "gpu")


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


@dataclass(frozen=True)
class DevicesByType:
    """The devices of this machine that steps get, by the type in their resource hints."""

    by_type: Mapping[str, tuple[str, ...]]
    taken: Mapping[str, str]  # devices of an unknown type → the type that they stand for
    devices: tuple[str, ...]
    names: Mapping[str, str]

    @classmethod
    def share_out(
        cls, wanted: Iterable[tuple[str, int]], devices: Sequence[str], names: Mapping[str, str]
    ) -> DevicesByType:
        """Share the devices out among the types that steps ask for, each with the count that a step needs.

        A device with a name goes to all types that the name fits; a device of an unknown type to one of them.
        ``names`` are those that the driver tells, by device.

        >>> found = DevicesByType.share_out([("nvidia-l4", 1), ("nvidia-h100-80gb", 1)], ["declared:0", "gpu:0"],
        ...     {"gpu:0": "NVIDIA L4"})
        >>> found.of("nvidia-l4"), found.of("nvidia-h100-80gb"), found.of("nvidia-tesla-t4")
        (('gpu:0',), ('declared:0',), ())
        """
        counts: dict[str, int] = {}
        for kind, count in wanted:
            if kind.lower() not in _ANY:
                counts[kind] = max(count, counts.get(kind, 0))
        by_type = {kind: [d for d in devices if is_of_type(kind, d, names.get(d, ""))] for kind in counts}
        unknown = [d for d in devices if not names.get(d)]
        taken: dict[str, str] = {}
        alike: dict[frozenset[str], list[str]] = {}  # spellings of one type
        for kind in counts:
            alike.setdefault(_words(kind), []).append(kind)
        # First those that have too few, in the order of the steps; then what is left in turns.
        lacking = [ks for ks in alike.values() if sum(bool(names.get(d)) for d in by_type[ks[0]]) < counts[ks[0]]]
        turn = 0
        while unknown and lacking:
            kinds = lacking[turn % len(lacking)]
            fitting = [d for d in unknown if d in by_type[kinds[0]]][: max(counts[kind] for kind in kinds)]
            if not fitting:
                lacking.remove(kinds)
                continue
            taken.update(dict.fromkeys(fitting, kinds[0]))
            unknown = [d for d in unknown if d not in fitting]
            turn += 1
        own = {kind: {d for d in devices if names.get(d) or taken.get(d) in alike[_words(kind)]} for kind in counts}
        kept = {kind: tuple(d for d in found if d in own[kind]) for kind, found in by_type.items()}
        return cls(kept, taken, tuple(devices), names)

    def of(self, kind: str) -> tuple[str, ...]:
        """Return the devices for steps with this type in their hints. Steps that leave it open join the first type."""
        if kind.lower() in _ANY:
            is_shared = len({frozenset(found) for found in self.by_type.values() if found}) > 1
            return next(found for found in self.by_type.values() if found) if is_shared else self.devices
        return self.by_type.get(kind, ())

    def describe(self) -> str:
        """Return which devices the machine has, with their names, or the types that they stand for."""
        known = {device: f"taken as {kind}" for device, kind in self.taken.items()}
        known |= {device: name for device, name in self.names.items() if name}
        return ", ".join(f"{device} ({known[device]})" if device in known else device for device in self.devices)


def is_of_type(kind: str, device: str, name: str) -> bool:
    """Return whether a device may be of the type in a hint. ``name`` is what its driver calls it; empty if unknown.

    >>> [is_of_type("nvidia-a100-80gb", "gpu:0", name) for name in ("NVIDIA A100 80GB PCIe", "NVIDIA A100-SXM4-40GB")]
    [True, False]
    >>> [is_of_type("nvidia-l4", "gpu:0", name) for name in ("NVIDIA L4", "NVIDIA L40S", "")]
    [True, False, True]
    """
    asked = kind.lower()
    if device.startswith("tpu:"):
        return not asked.startswith(_OTHER_MAKERS)
    if device.startswith("gpu:") and asked.startswith("tpu"):
        return False
    if not name or asked in _ANY:
        return True
    wanted, has = _words(asked), _words(name)
    memory = [{word for word in words if _MEMORY.match(word)} for words in (wanted, has)]
    return wanted - memory[0] <= has and (not memory[0] or not memory[1] or memory[0] == memory[1])


def _words(name: str) -> frozenset[str]:
    """Return the words of a type or of a device's name that tell it from others, with its memory as 80g."""
    words = [_MEMORY.sub(r"\1g", word) for word in _WORDS.findall(name.lower())]
    return frozenset(word for word in words if word not in _NO_MODEL and not re.match(r"sxm\d?$|hbm\d?e?$", word))


def cluster_type(step: str, hint: str, nodes: Iterable[Node], known: Iterable[str]) -> str:
    """Return the cluster's name for the type in a step's resource hint; empty if the hint leaves it open.

    ``known`` are the names that the cluster's software knows, whether or not a node has such an accelerator.

    Raises :class:`ResourcesExceeded` for a type that neither a node nor ``known`` has.

    >>> nodes = [Node("a", "10.0.0.1", 4.0, 8 << 30, 1.0, "A100")]
    >>> [cluster_type("Infer", t, nodes, ["T4", "A100-80G"]) for t in ("nvidia-tesla-t4", "nvidia-a100-80gb", "any")]
    ['T4', 'A100', '']
    """
    if hint.lower() in _ANY:
        return ""
    present = types_of(nodes)
    for names in (present, known):  # what a node has wins: a name with a variant may stand for one without
        by_name = {_plain(name): name for name in names}
        for spelling in _spellings(hint):
            if spelling in by_name:
                return by_name[spelling]
    question = did_you_mean(hint.upper(), {*present, *known})
    raise ResourcesExceeded(
        f"step {step!r} asks for an accelerator of type {hint!r}, which Ray does not know; this cluster has "
        + (", ".join(present) or "no accelerator with a type")
        + (f"; {question}" if question else ""),
        fix="write the type as Ray names it, such as accelerator='type:T4;count:1', or leave it out for any type",
    )


def types_of(nodes: Iterable[Node]) -> tuple[str, ...]:
    """Return the types of the accelerators of some nodes, sorted."""
    return tuple(sorted({each for node in nodes if node.accelerators for each in node.types}))


def _spellings(hint: str) -> Iterator[str]:
    """Yield the names that a type may have, the most exact one first."""
    name = hint.lower().replace("_", "-")
    yield _plain(name)
    name = _MAKERS.sub("", name)
    yield _plain(name)
    name = _FAMILY.sub("", name)
    yield _plain(name)
    while (shorter := _VARIANT.sub("", name)) != name:
        name = shorter
        yield _plain(name)


def _plain(name: str) -> str:
    """Return a name for comparisons: A100-80G and a100-80gb are the same."""
    return re.sub(r"(\d)gb$", r"\1g", name.lower().replace("_", "-"))
