"""Where the page draws the graph of a run: its stages, or the author's steps with composites folded or open.

All places are computed here, by the layout that ``lum plan`` uses. The page only draws them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from luminosity.engine.explain.layout import Gaps, Link, Size, lay_out

__all__ = ["MOST_OPEN", "StepTree", "stage_graph"]

MOST_OPEN = 1_000  # composites that a reader may open at once
_MOST_KEPT = 64  # drawings; a large one takes a second to compute
_WIDTH, _HEIGHT = 194, 50  # of a box, in pixels; graph.js draws it
_HEAD, _PADDING = 34, 14  # of the frame around the parts of an open composite
Content = dict[str, Any]
Point = tuple[float, float]


@dataclass(frozen=True)
class _Direction:
    """A direction of the flow: sizes and paddings across it and along it."""

    across: int
    along: int
    before: Point  # the room of a frame before its parts
    gaps: Gaps


_DIRECTIONS = {
    "down": _Direction(
        _WIDTH, _HEIGHT, (_PADDING, _HEAD), Gaps(boxes=24, links=12, least_drop=34, most_drop=34, ports=0)
    ),
    "right": _Direction(
        _HEIGHT, _WIDTH, (_HEAD, _PADDING), Gaps(boxes=16, links=12, least_drop=46, most_drop=46, ports=0)
    ),
}


@dataclass(frozen=True)
class _Arrow:
    """A link from one box to another, which may be in other composites."""

    source: int
    target: int
    is_side: bool


def stage_graph(stages: Sequence[Content]) -> Content:
    """Return where the page draws the stages of a run and the links between them."""
    places = {stage["id"]: place for place, stage in enumerate(stages)}
    arrows: dict[tuple[int, int], _Arrow] = {}
    for target, stage in enumerate(stages):
        for name, is_side in (("reads_from", False), ("side_inputs_from", True)):
            for source in stage.get(name, ()):
                arrows.setdefault(
                    (places.get(source, target), target), _Arrow(places.get(source, target), target, is_side)
                )
    drawing = _drawn((-1,) * len(stages), tuple(arrows.values()), frozenset())
    nodes = [{"id": place, "label": stage["label"], "stage": stage["id"]} for place, stage in enumerate(stages)]
    return {"nodes": nodes, "layouts": drawing}


class StepTree:
    """The transforms of a run as its author applied them, and the stages in which their parts ran."""

    def __init__(self, started: Content) -> None:
        """``started`` is the first event of a run as JSON."""
        transforms: Sequence[Content] = started.get("transforms", ())
        self._labels = [str(each["name"]) for each in transforms]
        # A composite stands before its parts: other places of a damaged record would make a circle.
        self._inside = tuple(
            inside if -1 <= (inside := int(each.get("inside", -1))) < place else -1
            for place, each in enumerate(transforms)
        )
        self._moves = [str(each.get("moves", "")) for each in transforms]
        self._names: list[str] = []
        for label, inside in zip(self._labels, self._inside, strict=True):
            self._names.append(f"{self._names[inside]}/{label}" if inside >= 0 else label)
        self._parts: dict[int, list[int]] = defaultdict(list)
        for place, inside in enumerate(self._inside):
            self._parts[inside].append(place)
        self._arrows = tuple(
            _Arrow(source, target, is_side)
            for target, each in enumerate(transforms)
            for name, is_side in (("reads_from", False), ("side_inputs_from", True))
            for source in each.get(name, ())
            if 0 <= source < len(transforms)
        )
        places = {name: place for place, name in enumerate(self._names)}
        self._homes = {
            stage["id"]: [_home(step, places) for step in stage.get("steps", ())] for stage in started["stages"]
        }

    @property
    def is_known(self) -> bool:
        """Whether the record has the author's transforms; those of older versions do not."""
        return bool(self._labels)

    def content(self) -> Content:
        """Return what does not depend on what is open: the transforms, and where the steps of each stage belong."""
        transforms = [
            {"name": name, "label": label, "inside": inside, "moves": moves}
            for name, label, inside, moves in zip(self._names, self._labels, self._inside, self._moves, strict=True)
        ]
        return {"transforms": transforms, "homes": self._homes}

    def drawn(self, wanted: Iterable[int]) -> Content:
        """Return the graph with these composites open. A composite with a single part opens together with it."""
        opened = self._opened(wanted)
        shown = [place for place in range(len(self._labels)) if self._is_shown(place, opened)]
        nodes = [{"id": place, "label": self._labels[place]} for place in shown if place not in opened]
        frames = [place for place in shown if place in opened]
        return {"nodes": nodes, "open": frames, "layouts": _drawn(self._inside, self._arrows, frozenset(opened))}

    def _is_shown(self, place: int, opened: set[int]) -> bool:
        inside = self._inside[place]
        return inside < 0 or (inside in opened and self._is_shown(inside, opened))

    def _opened(self, wanted: Iterable[int]) -> set[int]:
        asked = {place for place in wanted if self._parts.get(place)} - {-1}
        only = self._parts.get(-1, [])
        waiting = [*asked, *(only if len(only) == 1 and self._parts.get(only[0]) else ())]
        opened: set[int] = set()
        while waiting:
            place = waiting.pop()
            opened.add(place)
            parts = self._parts[place]
            if len(parts) == 1 and self._parts.get(parts[0]) and parts[0] not in opened:
                waiting.append(parts[0])
        return opened


def _home(step: str, places: Mapping[str, int]) -> int:
    """Return the innermost transform of the author that a step belongs to; the planner makes several of some."""
    while step and step not in places:
        step = step.rpartition("/")[0]
    return places.get(step, -1)


@lru_cache(_MOST_KEPT)  # the graph of a run does not change while it is followed
def _drawn(inside: tuple[int, ...], arrows: tuple[_Arrow, ...], opened: frozenset[int]) -> Content:
    """Return the layouts for both directions of the flow."""
    return {name: _Drawing(inside, arrows, opened, direction).content() for name, direction in _DIRECTIONS.items()}


class _Drawing:
    """The places of all boxes, frames and links for one direction, in pixels across the flow and along it."""

    def __init__(
        self, inside: tuple[int, ...], arrows: tuple[_Arrow, ...], opened: frozenset[int], direction: _Direction
    ) -> None:
        self._inside = inside
        self._opened = opened
        self._direction = direction
        self._parts: dict[int, list[int]] = defaultdict(list)
        for place, outer in enumerate(inside):
            self._parts[outer].append(place)
        self._at: dict[int, Point] = {}  # the middle of each box
        self._frames: dict[int, tuple[float, float, float, float]] = {}
        self._routes: list[Content] = []
        # By the composite inside which a link runs: the boxes there, and the visible ends of the link.
        self._links: dict[int, dict[tuple[int, int], list[_Arrow]]] = defaultdict(lambda: defaultdict(list))
        for arrow in dict.fromkeys(self._visible(arrow) for arrow in arrows):
            self._add(arrow)

    def content(self) -> Content:
        """Return everything that the page needs."""
        across, along = self._lay_out(-1, self._measured(-1), (0.0, 0.0))
        return {
            "at": {place: _rounded(point) for place, point in self._at.items()},
            "frames": [{"id": place, "box": _rounded(box)} for place, box in self._frames.items()],
            "routes": self._routes,
            "across": round(across, 1),
            "along": round(along, 1),
        }

    def _visible(self, arrow: _Arrow) -> _Arrow:
        return _Arrow(self._end(arrow.source), self._end(arrow.target), arrow.is_side)

    def _end(self, place: int) -> int:
        """Return the outermost folded composite around a step, or the step."""
        found = place
        while place >= 0:
            if place not in self._opened:
                found = place
            place = self._inside[place]
        return found

    def _add(self, arrow: _Arrow) -> None:
        chains = [self._chain(arrow.source), self._chain(arrow.target)]
        for outer, (one, two) in enumerate(zip(*chains, strict=False)):
            if one == two:
                continue
            # What is written stands before what reads it: other links of a damaged record would make a circle.
            if one < two:
                composite = chains[0][outer - 1] if outer else -1
                self._links[composite][one, two].append(arrow)
            return

    def _chain(self, place: int) -> list[int]:
        """Return a box and the open composites around it, the outermost first."""
        chain = [place]
        while (place := self._inside[place]) >= 0:
            chain.append(place)
        return chain[::-1]

    def _measured(self, composite: int) -> Any:
        """Return the layout of the parts of a composite, and those of the composites in it that are open."""
        inner = {part: self._measured(part) for part in self._parts[composite] if part in self._opened}
        before = self._direction.before
        sizes: dict[str, Size] = {}
        for part in self._parts[composite]:
            if part in inner:
                layout = inner[part][0]
                sizes[str(part)] = Size(layout.width + before[0] + _PADDING, layout.height + before[1] + _PADDING)
            else:
                sizes[str(part)] = Size(self._direction.across, self._direction.along)
        links = [Link(str(source), str(target)) for source, target in self._links[composite]]
        return lay_out(sizes, links, self._direction.gaps), inner

    def _lay_out(self, composite: int, measured: Any, origin: Point) -> Point:
        """Place the parts of a composite, whose corner is at ``origin``. Returns how much room they take."""
        layout, inner = measured
        for name, box in layout.boxes.items():
            part, left, top = int(name), origin[0] + box.left, origin[1] + box.top
            if part in inner:
                self._frames[part] = (left, top, box.width, box.height)
                before = self._direction.before
                self._lay_out(part, inner[part], (left + before[0], top + before[1]))
            else:
                self._at[part] = (left + box.width / 2, top + box.height / 2)
        for link, points in layout.routes.items():
            moved = [(origin[0] + x, origin[1] + y) for x, y in points]
            self._route(self._links[composite][int(link.source), int(link.target)], int(link.source), moved)
        return layout.width, layout.height

    def _route(self, arrows: list[_Arrow], outer: int, points: list[Point]) -> None:
        """Add a link, with its ends inside open composites."""
        is_side = all(arrow.is_side for arrow in arrows)
        ends = {"from": arrows[0].source, "to": arrows[0].target, "is_side": is_side}
        targets = dict.fromkeys(arrow.target for arrow in arrows)
        is_into_frame = any(self._inside[target] != self._inside[outer] for target in targets)
        self._routes.append({**ends, "has_head": not is_into_frame, "points": [_rounded(point) for point in points]})
        half = self._direction.along / 2
        for arrow in arrows:
            ends = {"from": arrow.source, "to": arrow.target, "is_side": arrow.is_side}
            if self._inside[arrow.source] != self._inside[outer]:
                x, y = self._at[arrow.source]
                start = _rounded((x, y + half))
                self._routes.append({**ends, "has_head": False, "points": [start, start, _rounded(points[0])]})
            if self._inside[arrow.target] != self._inside[outer]:
                x, y = self._at[arrow.target]
                start = _rounded(points[-1])
                self._routes.append({**ends, "has_head": True, "points": [start, start, _rounded((x, y - half))]})


def _rounded(numbers: Sequence[float]) -> list[float]:
    return [round(number, 1) for number in numbers]
