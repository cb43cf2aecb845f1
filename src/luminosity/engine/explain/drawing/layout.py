"""A layered layout: boxes from top to bottom, each below all that lead to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from luminosity.engine.explain.drawing.layers import Bend, Layers, Link, Segment, Spot, layered
from luminosity.engine.explain.drawing.placing import placed

_LEAST_DROP, _MOST_DROP = 26.0, 64.0  # between layers; more where links run far to the side
_DROP_PER_WIDTH = 0.12
_PORT_STEP = 18.0

Point = tuple[float, float]


@dataclass(frozen=True)
class Size:
    width: float
    height: float
    has_ports: bool = True  # links end side by side, not all in the middle


@dataclass(frozen=True)
class Rectangle:
    left: float
    top: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def bottom(self) -> float:
        return self.top + self.height


@dataclass(frozen=True)
class Layout:
    """Boxes, none over another, and the points that each link goes through: straight down and aside, by turns.

    It goes aside between layers only, where no boxes are.
    """

    boxes: dict[str, Rectangle]
    routes: dict[Link, list[Point]]
    width: float
    height: float


def lay_out(sizes: Mapping[str, Size], links: Sequence[Link]) -> Layout:
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
    """Top and bottom of each layer."""
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
        if isinstance(upper, str):  # a box may end above its layer's lower edge
            routes[link].append((starts[segment], boxes[upper].bottom))
        routes[link] += [(starts[segment], bands[depths[upper]][1]), (ends[segment], bands[depths[lower]][0])]
    return dict(routes)


def _ports(
    segments: list[Segment], sizes: Mapping[str, Size], xs: dict[Spot, float], *, end: int
) -> dict[Segment, float]:
    """Where on its box each segment begins (``end`` 0) or ends (1): side by side, in the order of the other ends."""
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
