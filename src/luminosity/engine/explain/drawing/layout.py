"""A layered layout: boxes from top to bottom, each below all boxes with a link to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from luminosity.engine.explain.drawing.layers import Bend, Layers, Link, Segment, Spot, layered
from luminosity.engine.explain.drawing.placing import placed

__all__ = ["Layout", "Point", "Rectangle", "Size", "lay_out"]


_LEAST_DROP, _MOST_DROP = 26.0, 64.0  # pixels between layers; more if links run far to the side
_DROP_PER_WIDTH = 0.12  # pixels of drop for each pixel that a link runs to the side
_PORT_STEP = 18.0  # pixels between the ends of two links at a box

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


def lay_out(sizes: Mapping[str, Size], links: Sequence[Link]) -> Layout:
    """Place boxes of the given sizes and route the links between them. ``links`` have no cycle."""
    layers = layered(list(sizes), links)
    xs = placed(layers, {box: size.width for box, size in sizes.items()})
    depths = {spot: depth for depth, row in enumerate(layers.rows) for spot in row}
    bands = _bands(layers, depths, sizes, xs)
    boxes = {
        box: Rectangle(xs[box] - size.width / 2, bands[depths[box]][0], size.width, size.height)
        for box, size in sizes.items()
    }
    routes = _routes(layers, depths, sizes, boxes, xs, bands)
    edges = [box.right for box in boxes.values()] + [x for route in routes.values() for x, _ in route]
    return Layout(boxes, routes, max(edges, default=0.0), bands[-1][1] if bands else 0.0)


def _bands(
    layers: Layers, depths: dict[Spot, int], sizes: Mapping[str, Size], xs: dict[Spot, float]
) -> list[tuple[float, float]]:
    """Return the top and the bottom of each layer."""
    farthest = [0.0] * len(layers.rows)
    for upper, lower in layers.segments:
        farthest[depths[lower]] = max(farthest[depths[lower]], abs(xs[upper] - xs[lower]))
    bands: list[tuple[float, float]] = []
    for row, aside in zip(layers.rows, farthest, strict=True):
        drop = min(_MOST_DROP, max(_LEAST_DROP, aside * _DROP_PER_WIDTH))
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
) -> dict[Link, list[Point]]:
    starts = _ports(layers.segments, sizes, xs, end=0)
    ends = _ports(layers.segments, sizes, xs, end=1)
    routes: dict[Link, list[Point]] = defaultdict(list)
    for segment in layers.segments:
        upper, lower = segment
        link = upper.link if isinstance(upper, Bend) else lower.link if isinstance(lower, Bend) else Link(upper, lower)
        if isinstance(upper, str):  # a box may be lower than its layer is high
            routes[link].append((starts[segment], boxes[upper].bottom))
        routes[link] += [(starts[segment], bands[depths[upper]][1]), (ends[segment], bands[depths[lower]][0])]
    return dict(routes)


def _ports(
    segments: list[Segment], sizes: Mapping[str, Size], xs: dict[Spot, float], *, end: int
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
            step = min(_PORT_STEP, sizes[spot].width / (len(own) + 1))
        for index, segment in enumerate(own):
            ports[segment] = xs[spot] + step * (index - (len(own) - 1) / 2)
    return ports
