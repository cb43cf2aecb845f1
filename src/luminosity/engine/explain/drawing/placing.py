"""The second half of a layered layout: the x coordinate of each box and each bend within its row."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping

from luminosity.engine.explain.drawing.layers import Bend, Layers, Spot

__all__ = ["placed"]


_SWEEPS = 24  # more move nothing visibly in the plans tried
_BETWEEN_BOXES = 28.0  # pixels
_BETWEEN_LINKS = 14.0  # pixels

_Side = tuple[Spot, float]  # a neighbour in the row, and its least distance
_Sides = tuple[_Side | None, _Side | None]


def placed(layers: Layers, widths: Mapping[str, float]) -> dict[Spot, float]:
    """Return the middle of each spot, as near to its neighbours as order and widths allow. The leftmost edge is 0."""
    above: dict[Spot, list[Spot]] = defaultdict(list)
    below: dict[Spot, list[Spot]] = defaultdict(list)
    for upper, lower in layers.segments:
        above[lower].append(upper)
        below[upper].append(lower)
    rows = [(row, _gaps(row, widths)) for row in layers.rows]
    xs = {spot: x for row, gaps in rows for spot, x in zip(row, _spread([0.0] * len(row), gaps), strict=True)}
    for sweep in range(_SWEEPS):
        neighbours = above if sweep % 2 == 0 else below
        for row, gaps in rows if sweep % 2 == 0 else reversed(rows):
            wanted: list[float] = []
            for spot in row:
                pulls = neighbours[spot] or [spot]
                wanted.append(sum(xs[other] for other in pulls) / len(pulls))
            xs |= zip(row, _spread(wanted, gaps), strict=True)
    beside = {spot: sides for row, gaps in rows for spot, sides in zip(row, _sides(row, gaps), strict=True)}
    runs = sorted(_runs(above, below), key=len, reverse=True)
    for run in runs * 2:  # the first round may make room for the second
        _straighten(run, beside, xs)
    left = min((xs[spot] - _width(spot, widths) / 2 for spot in xs), default=0.0)
    return {spot: x - left for spot, x in xs.items()}


def _sides(row: list[Spot], gaps: list[float]) -> Iterator[_Sides]:
    for place in range(len(row)):
        left = (row[place - 1], gaps[place - 1]) if place else None
        right = (row[place + 1], gaps[place]) if place + 1 < len(row) else None
        yield left, right


def _straighten(run: list[Spot], beside: dict[Spot, _Sides], xs: dict[Spot, float]) -> None:
    """Align the spots of a run exactly below each other, as many at a time as there is room for."""
    least, most = -math.inf, math.inf
    straight: list[Spot] = []
    for spot in [*run, None]:
        own_least, own_most = _room(beside[spot], xs) if spot is not None else (math.inf, -math.inf)
        if straight and max(least, own_least) > min(most, own_most):
            mean = sum(xs[other] for other in straight) / len(straight)
            xs |= dict.fromkeys(straight, min(max(mean, least), most))
            least, most, straight = -math.inf, math.inf, []
        if spot is not None:
            least, most = max(least, own_least), min(most, own_most)
            straight.append(spot)


def _room(sides: _Sides, xs: dict[Spot, float]) -> tuple[float, float]:
    """Return the least and the greatest x that leave room for both neighbours."""
    left, right = sides
    return xs[left[0]] + left[1] if left else -math.inf, xs[right[0]] - right[1] if right else math.inf


def _runs(above: dict[Spot, list[Spot]], below: dict[Spot, list[Spot]]) -> Iterator[list[Spot]]:
    """Yield chains of spots in which each spot is the only neighbour of the next one."""

    def follower(spot: Spot) -> Spot | None:
        lower = below[spot][0] if len(below.get(spot, ())) == 1 else None
        return lower if lower is not None and len(above[lower]) == 1 else None

    followers = {spot: lower for spot in list(below) if (lower := follower(spot)) is not None}
    inside = set(followers.values())
    for first in (spot for spot in followers if spot not in inside):
        run = [first]
        while run[-1] in followers:
            run.append(followers[run[-1]])
        yield run


def _width(spot: Spot, widths: Mapping[str, float]) -> float:
    return 0.0 if isinstance(spot, Bend) else widths[spot]


def _gaps(row: list[Spot], widths: Mapping[str, float]) -> list[float]:
    """Return the least distance between the middles of each spot and the one before it."""
    gaps: list[float] = []
    for left, right in itertools.pairwise(row):
        room = _BETWEEN_LINKS if isinstance(left, Bend) and isinstance(right, Bend) else _BETWEEN_BOXES
        gaps.append((_width(left, widths) + _width(right, widths)) / 2 + room)
    return gaps


def _spread(wanted: list[float], gaps: list[float]) -> list[float]:
    """Return the places nearest to the wanted ones, by least squares, that keep the order and the gaps.

    >>> _spread([0.0, 0.0, 9.0], [2.0, 2.0])
    [-1.0, 1.0, 9.0]
    """
    offsets = [0.0, *itertools.accumulate(gaps)]
    # Without the gaps, places must not decrease (isotonic regression): a place that would joins the group before it,
    # and the whole group moves to its mean.
    blocks: list[tuple[float, int]] = []  # sum, count
    for place, offset in zip(wanted, offsets, strict=False):
        total, count = place - offset, 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / count:
            other_total, other_count = blocks.pop()
            total, count = total + other_total, count + other_count
        blocks.append((total, count))
    means = [total / count for total, count in blocks for _ in range(count)]
    return [mean + offset for mean, offset in zip(means, offsets, strict=False)]
