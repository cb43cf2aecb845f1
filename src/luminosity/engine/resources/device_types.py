"""The types of accelerators in resource hints, such as ``nvidia-tesla-t4``, as a cluster names them: ``T4``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from luminosity._text import did_you_mean
from luminosity.engine.resources.nodes import Node
from luminosity.errors import ResourcesExceeded

__all__ = ["cluster_type", "types_of"]

_ANY = frozenset(["", "any", "gpu", "tpu"])  # a hint with one of these leaves the type open
_MAKERS = re.compile(r"^(nvidia|google|intel|amd|apple|aws|huawei)-")
_FAMILY = re.compile(r"^tesla-")
_VARIANT = re.compile(r"-(\d+gb?|mega|mega-\d+gb?|sxm\d?|pcie|nvl)$")  # what a cluster's name leaves out


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
