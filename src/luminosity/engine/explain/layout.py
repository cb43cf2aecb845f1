"""A layered layout of boxes and links: layers from top to bottom, few crossings, straight runs.

Each box is below all boxes with a link to it. :func:`lay_out` assigns boxes to layers, orders and places each layer,
and routes the links.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Gaps", "Layout", "Link", "Point", "Rectangle", "Size", "lay_out"]

_ORDER_SWEEPS = 12  # more find no better order in the plans tried
_PLACE_SWEEPS = 24  # more move nothing visibly in the plans tried
_DROP_PER_WIDTH = 0.12  # pixels of drop for each pixel that a link runs to the side


@dataclass(frozen=True)
class Gaps:
    """The distances in a picture, in pixels."""

    boxes: float = 28.0  # between two boxes of a layer
    links: float = 14.0  # between two links that pass through a layer
    least_drop: float = 26.0  # between two layers
    most_drop: float = 64.0  # the same, if links run far to the side
    ports: float = 18.0  # between the ends of two links at a box; 0: all end in its middle


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


def _layered(boxes: Sequence[str], links: Sequence[Link]) -> Layers:
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
        for sweep in range(_ORDER_SWEEPS):
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


_Side = tuple[Spot, float]  # a neighbour in the row, and its least distance
_Sides = tuple[_Side | None, _Side | None]


def _placed(layers: Layers, widths: Mapping[str, float], gap: Gaps) -> dict[Spot, float]:
    """Return the middle of each spot, as near to its neighbours as order and widths allow. The leftmost edge is 0."""
    above: dict[Spot, list[Spot]] = defaultdict(list)
    below: dict[Spot, list[Spot]] = defaultdict(list)
    for upper, lower in layers.segments:
        above[lower].append(upper)
        below[upper].append(lower)
    rows = [(row, _distances(row, widths, gap)) for row in layers.rows]
    xs = {spot: x for row, gaps in rows for spot, x in zip(row, _spread([0.0] * len(row), gaps), strict=True)}
    for sweep in range(_PLACE_SWEEPS):
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


def _distances(row: list[Spot], widths: Mapping[str, float], gap: Gaps) -> list[float]:
    """Return the least distance between the middles of each spot and the one before it."""
    gaps: list[float] = []
    for left, right in itertools.pairwise(row):
        room = gap.links if isinstance(left, Bend) and isinstance(right, Bend) else gap.boxes
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


Point = tuple[float, float]


@dataclass(frozen=True)
class Size:
    """The size of a box in pixels."""

    width: float
    height: float
    has_ports: bool = True  # links end side by side; otherwise all in the middle


@dataclass(frozen=True)
class Rectangle:
    """A box at its place, in pixels from the top left corner of the picture."""

    left: float
    top: float
    width: float
    height: float

    @property
    def right(self) -> float:
        """The x coordinate of the right edge."""
        return self.left + self.width

    @property
    def bottom(self) -> float:
        """The y coordinate of the bottom edge."""
        return self.top + self.height


@dataclass(frozen=True)
class Layout:
    """Boxes that don't overlap, and the points that each link goes through.

    A link goes straight down through a layer and sideways between two layers, where there are no boxes.
    """

    boxes: dict[str, Rectangle]
    routes: dict[Link, list[Point]]
    width: float
    height: float


def lay_out(sizes: Mapping[str, Size], links: Sequence[Link], gaps: Gaps | None = None) -> Layout:
    """Place boxes of the given sizes and route the links between them. ``links`` have no cycle."""
    gaps = gaps or Gaps()
    layers = _layered(list(sizes), links)
    xs = _placed(layers, {box: size.width for box, size in sizes.items()}, gaps)
    depths = {spot: depth for depth, row in enumerate(layers.rows) for spot in row}
    bands = _bands(layers, depths, sizes, xs, gaps)
    boxes = {
        box: Rectangle(xs[box] - size.width / 2, bands[depths[box]][0], size.width, size.height)
        for box, size in sizes.items()
    }
    routes = _routes(layers, depths, sizes, boxes, xs, bands, gaps.ports)
    edges = [box.right for box in boxes.values()] + [x for route in routes.values() for x, _ in route]
    return Layout(boxes, routes, max(edges, default=0.0), bands[-1][1] if bands else 0.0)


def _bands(
    layers: Layers, depths: dict[Spot, int], sizes: Mapping[str, Size], xs: dict[Spot, float], gaps: Gaps
) -> list[tuple[float, float]]:
    """Return the top and the bottom of each layer."""
    farthest = [0.0] * len(layers.rows)
    for upper, lower in layers.segments:
        farthest[depths[lower]] = max(farthest[depths[lower]], abs(xs[upper] - xs[lower]))
    bands: list[tuple[float, float]] = []
    for row, aside in zip(layers.rows, farthest, strict=True):
        drop = min(gaps.most_drop, max(gaps.least_drop, aside * _DROP_PER_WIDTH))
        top = bands[-1][1] + drop if bands else 0.0
        bands.append((top, top + max((sizes[spot].height for spot in row if isinstance(spot, str)), default=0.0)))
    return bands


def _routes(
    layers: Layers,
    depths: dict[Spot, int],
    sizes: Mapping[str, Size],
    boxes: dict[str, Rectangle],
    xs: dict[Spot, float],
    bands: list[tuple[float, float]],
    port_step: float,
) -> dict[Link, list[Point]]:
    starts = _ports(layers.segments, sizes, xs, port_step, end=0)
    ends = _ports(layers.segments, sizes, xs, port_step, end=1)
    routes: dict[Link, list[Point]] = defaultdict(list)
    for segment in layers.segments:
        upper, lower = segment
        link = upper.link if isinstance(upper, Bend) else lower.link if isinstance(lower, Bend) else Link(upper, lower)
        if isinstance(upper, str):  # a box may be lower than its layer is high
            routes[link].append((starts[segment], boxes[upper].bottom))
        routes[link] += [(starts[segment], bands[depths[upper]][1]), (ends[segment], bands[depths[lower]][0])]
    return dict(routes)


def _ports(
    segments: list[Segment], sizes: Mapping[str, Size], xs: dict[Spot, float], port_step: float, *, end: int
) -> dict[Segment, float]:
    """Return where each segment touches the box at its upper (``end`` 0) or lower end (1).

    Segments of one box are side by side, in the order of their other ends.
    """
    by_spot: dict[Spot, list[Segment]] = defaultdict(list)
    for segment in segments:
        by_spot[segment[end]].append(segment)
    ports: dict[Segment, float] = {}
    for spot, own in by_spot.items():
        own.sort(key=lambda segment: xs[segment[1 - end]])
        step = 0.0
        if isinstance(spot, str) and sizes[spot].has_ports:
            step = min(port_step, sizes[spot].width / (len(own) + 1))
        for index, segment in enumerate(own):
            ports[segment] = xs[spot] + step * (index - (len(own) - 1) / 2)
    return ports
