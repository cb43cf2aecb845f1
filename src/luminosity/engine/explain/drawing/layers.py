"""The first half of a layered layout: assign each box to a layer, and order the boxes within each layer."""

from __future__ import annotations

import itertools
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Bend", "Layers", "Link", "Segment", "Spot", "layered"]


_SWEEPS = 12  # more find no better order in the plans tried


@dataclass(frozen=True)
class Link:
    """An arrow from one box to another."""

    source: str
    target: str
    span: int = 1  # layers from source to target, at least


@dataclass(frozen=True)
class Bend:
    """The place where a link passes through a layer between its ends."""

    link: Link
    layer: int


Spot = str | Bend
Segment = tuple[Spot, Spot]  # from one layer to the next


@dataclass(frozen=True)
class Layers:
    """Rows from top to bottom, each from left to right, and the segments of links between adjacent rows."""

    rows: list[list[Spot]]
    segments: list[Segment]


def layered(boxes: Sequence[str], links: Sequence[Link]) -> Layers:
    """Assign layers by the longest path, and order each layer so that few links cross. ``links`` have no cycle."""
    depths = _depths(boxes, links)
    rows: list[list[Spot]] = [[] for _ in range(max(depths.values(), default=-1) + 1)]
    for box in boxes:
        rows[depths[box]].append(box)
    segments: list[Segment] = []
    for link in links:
        spots: list[Spot] = [link.source]
        for layer in range(depths[link.source] + 1, depths[link.target]):
            spots.append(Bend(link, layer))
            rows[layer].append(spots[-1])
        spots.append(link.target)
        segments += itertools.pairwise(spots)
    return Layers(_ordered(rows, segments), segments)


def _depths(boxes: Sequence[str], links: Sequence[Link]) -> dict[str, int]:
    incoming, outgoing = _by_end(links, "target"), _by_end(links, "source")
    depths: dict[str, int] = {}
    ready = [box for box in boxes if not incoming[box]]
    missing = {box: len(incoming[box]) for box in boxes}
    for box in ready:  # grows during the iteration
        depths[box] = max((depths[link.source] + link.span for link in incoming[box]), default=0)
        for link in outgoing[box]:
            missing[link.target] -= 1
            if not missing[link.target]:
                ready.append(link.target)
    # Put a source right above its reader, not at the top of the picture.
    for box in boxes:
        if not incoming[box] and outgoing[box]:
            depths[box] = min(depths[link.target] - link.span for link in outgoing[box])
    return depths


def _by_end(links: Iterable[Link], end: str) -> dict[str, list[Link]]:
    found: dict[str, list[Link]] = defaultdict(list)
    for link in links:
        found[getattr(link, end)].append(link)
    return found


def _ordered(rows: list[list[Spot]], segments: list[Segment]) -> list[list[Spot]]:
    """Sort each row by its neighbours in the previous row, downwards and upwards; keep the best order."""
    above: dict[Spot, list[Spot]] = defaultdict(list)
    below: dict[Spot, list[Spot]] = defaultdict(list)
    for upper, lower in segments:
        above[lower].append(upper)
        below[upper].append(lower)
    best, least = rows, _crossings(rows, below)
    for begins_down in (True, False):  # each may find an order that the other misses
        tried = rows
        for sweep in range(_SWEEPS):
            is_down = (sweep % 2 == 0) == begins_down
            # Swap spots with equal keys in every other pair of sweeps; otherwise the search goes in circles.
            tried = _swept(tried, above, below, is_down=is_down, flips_equals=sweep // 2 % 2 == 1)
            if (crossings := _crossings(tried, below)) < least:
                best, least = tried, crossings
    return best


def _swept(
    rows: list[list[Spot]],
    above: dict[Spot, list[Spot]],
    below: dict[Spot, list[Spot]],
    *,
    is_down: bool,
    flips_equals: bool,
) -> list[list[Spot]]:
    ordered, neighbours = (rows, above) if is_down else (rows[::-1], below)
    swept = ordered[:1]
    for row in ordered[1:]:
        fixed = {spot: place for place, spot in enumerate(swept[-1])}
        keys: dict[Spot, float] = {}
        for place, spot in enumerate(row):
            places = [fixed[neighbour] for neighbour in neighbours[spot]]
            keys[spot] = sum(places) / len(places) if places else place
        swept.append(sorted(row[::-1] if flips_equals else row, key=keys.__getitem__))
    return swept if is_down else swept[::-1]


def _crossings(rows: list[list[Spot]], below: dict[Spot, list[Spot]]) -> int:
    count = 0
    for upper, lower in itertools.pairwise(rows):
        places = {spot: place for place, spot in enumerate(lower)}
        seen: list[int] = []
        for spot in upper:
            ends = [places[other] for other in below[spot]]
            count += sum(len(seen) - bisect_right(seen, end) for end in ends)
            for end in ends:
                insort(seen, end)
    return count
