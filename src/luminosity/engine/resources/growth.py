"""Places for more workers on the nodes of a cluster, and how many workers the options let each pool have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from luminosity._shared.text import did_you_mean, list_some
from luminosity.engine.resources.machine import LeaseNeeds, Node, Rooms
from luminosity.errors import OptionError

__all__ = ["Growing", "check_pools", "grow", "more_places"]

_MOST_NAMED = 5  # pools in a message


@dataclass(eq=False)
class Growing:
    """A pool that gets places: what each of its workers asks for, and the ids of their nodes so far."""

    needs: LeaseNeeds
    nodes: list[str] = field(default_factory=list[str])  # an empty id stands for a node to come
    most: int | None = None  # workers

    @property
    def counted(self) -> int:
        """What limits count: the accelerators of all workers, or the workers if they have none."""
        return self.weight * len(self.nodes)

    @property
    def weight(self) -> int:
        """What limits count of each worker."""
        return self.needs.gpus or 1


def grow(group: Sequence[Growing], limit: int | None, rooms: Rooms | None) -> None:
    """Add workers to the pools in turn while there is room for them; without ``rooms``, they wait for nodes to join.

    All pools together get at most ``limit``: accelerators, or workers if they have none.
    """
    growing = [each for each in group if each.needs.gpus or each.needs.cpus]
    while growing:
        for each in list(growing):
            node = ""
            is_full = limit is not None and sum(other.counted for other in group) + each.weight > limit
            is_full = is_full or (each.most is not None and len(each.nodes) >= each.most)
            if is_full or (rooms is not None and not (node := rooms.place(each.needs))):
                growing.remove(each)
            else:
                each.nodes.append(node)


def more_places(
    pools: Sequence[Growing], nodes: Sequence[Node], accelerators: int | None, cpu_workers: int | None
) -> list[list[str]]:
    """Return for each pool the nodes with room for more of its workers, beside all workers that are there.

    The limits are those of all pools together. Pools with accelerators come first.

    >>> needs, nodes = LeaseNeeds(1.0, 0, 0), [Node("a", "10.0.0.1", 2.0, 0), Node("b", "10.0.0.2", 1.0, 0)]
    >>> more_places([Growing(needs, ["a"])], nodes, None, None)
    [['a', 'b']]
    """
    rooms = Rooms(nodes)
    before = [len(pool.nodes) for pool in pools]
    for pool in pools:
        for node in pool.nodes:
            rooms.enter(node, pool.needs)
    grow([pool for pool in pools if pool.needs.gpus], accelerators, rooms)
    grow([pool for pool in pools if not pool.needs.gpus], cpu_workers, rooms)
    return [pool.nodes[count:] for pool, count in zip(pools, before, strict=True)]


def check_pools(option: str, given: Mapping[str, int], names: Iterable[str]) -> None:
    """Raise :class:`OptionError` if an option names a pool that the run does not have."""
    names = list(names)
    for wanted in given:
        if not any(name.startswith(wanted) for name in names):
            question = did_you_mean(wanted, names)
            raise OptionError(
                f"--{option}={wanted}={given[wanted]}: found no such pool, expected one of "
                f"{list_some([repr(name) for name in names], _MOST_NAMED)}" + (f"; {question}" if question else ""),
                fix="`lum plan` shows the pools; a number alone is for each of them",
            )
