"""The types of accelerators in resource hints, such as ``nvidia-tesla-t4``.

A cluster names them as ``T4``, the driver of this machine as ``Tesla T4``. The type of a device is unknown if only
``--accelerators`` declares it, or if it has no driver that tells its name; such a device stands for any one type.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from luminosity._shared.text import did_you_mean
from luminosity.engine.resources.nodes import Node
from luminosity.errors import ResourcesExceeded

__all__ = ["DevicesByType", "cluster_type", "is_of_type", "types_of"]

_ANY = frozenset(["", "any", "gpu", "tpu"])  # a hint with one of these leaves the type open
_MAKERS = re.compile(r"^(nvidia|google|intel|amd|apple|aws|huawei)-")
_FAMILY = re.compile(r"^tesla-")
_VARIANT = re.compile(r"-(\d+gb?|mega|mega-\d+gb?|sxm\d?|pcie|nvl)$")  # what a cluster's name leaves out
_WORDS = re.compile(r"[a-z0-9.]+")
_MEMORY = re.compile(r"^(\d+)gb?$")
_NO_MODEL = frozenset(["nvidia", "tesla", "geforce", "google", "mega", "pcie", "nvl"])  # also what names of servers add
_OTHER_MAKERS = ("nvidia", "amd", "intel", "gpu")


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
