"""A plan as an SVG picture, which any browser shows."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from html import escape

from luminosity.engine.explain.drawing.layers import Link
from luminosity.engine.explain.drawing.layout import Point, Rectangle
from luminosity.engine.explain.drawing.lettering import text_width
from luminosity.engine.explain.drawing.picture import (
    HEAD_PX,
    LINE_PX,
    PADDING_PX,
    Picture,
    ReasonBox,
    StageBox,
    picture,
)
from luminosity.engine.explain.drawing.style import FONT, SMALL_PX, TITLE_PX, pool_classes, stylesheet
from luminosity.engine.explain.drawing.words import counted, machine_in_words, pool_in_words
from luminosity.engine.explain.explanation import Explanation

__all__ = ["svg"]


_MARGIN_PX = 28
_ARROW = """\
<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">\
<path class="head" d="M0 0 L8 4 L0 8 z"/></marker></defs>
"""


def svg(plans: Mapping[str, Explanation]) -> str:
    """Return one picture of all plans, one below the other, each under its title."""
    parts: list[str] = []
    width = height = float(_MARGIN_PX)
    for title, plan in plans.items():
        drawn = picture(plan)
        legend = list(_legend(title, plan, drawn))
        parts += [f'<g transform="translate({_MARGIN_PX} {height:.0f})">\n', *(line for line, _ in legend)]
        top = len(legend) * LINE_PX + _MARGIN_PX
        parts += [f'<g transform="translate(0 {top})">\n', *_plan(plan, drawn), "</g>\n</g>\n"]
        width = max(width, drawn.layout.width, *(room for _, room in legend))
        height += top + drawn.layout.height + _MARGIN_PX
    width += 2 * _MARGIN_PX
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" font-family="{FONT}">\n'
        f"<title>{_escaped(', '.join(plans))}</title>\n<style>\n{stylesheet()}</style>\n{_ARROW}"
        '<rect class="background" width="100%" height="100%"/>\n'
    )
    return head + "".join(parts) + "</svg>\n"


def _legend(title: str, plan: Explanation, drawn: Picture) -> Iterator[tuple[str, float]]:
    """Yield the lines of the legend, each with its width in pixels."""
    y = iter(range(0, 10_000, LINE_PX))
    yield f'<text class="title" y="{next(y) + 13}">{_escaped(title)}</text>\n', text_width(title, TITLE_PX)
    summary = f"{counted(len(plan.stages), 'stage')} on {machine_in_words(plan.machine)}"
    yield _small(0, next(y) + 13, summary), text_width(summary, SMALL_PX)
    for pool, style in zip(plan.pools, pool_classes(plan.pools), strict=True):
        top = next(y)
        swatch = f'<rect class="stage {style}" x="1" y="{top + 3}" width="22" height="12" rx="3"/>\n'
        words = pool_in_words(pool)
        yield swatch + _small(32, top + 13, words), 32 + text_width(words, SMALL_PX)
    for style, words, is_there in (
        ("side", "side input: complete before its reader starts", any(r.is_side_input for r in drawn.reasons.values())),
        ("inner", "side inputs inside one step", bool(drawn.inner_links)),
    ):
        if is_there:
            top = next(y)
            line = f'<path class="link {style}" d="M1 {top + 9} H23"/>\n'
            yield line + _small(32, top + 13, words), 32 + text_width(words, SMALL_PX)


def _plan(plan: Explanation, drawn: Picture) -> Iterator[str]:
    boxes = drawn.layout.boxes
    for link, route in drawn.layout.routes.items():
        yield _link(link, route, drawn)
    for key, box in drawn.reasons.items():
        yield from _reason(box, boxes[key])
    styles = pool_classes(plan.pools)
    for key, box in drawn.stages.items():
        yield from _stage(box, boxes[key], styles[plan.pools.index(box.stage.pool)])


def _stage(box: StageBox, at: Rectangle, style: str) -> Iterator[str]:
    stage = box.stage
    transforms = [name for step in stage.steps for name in step.transforms]
    yield f"<g>{_tooltip([f'Stage {stage.number}: {stage.label}', pool_in_words(stage.pool), *transforms])}"
    yield f'<rect class="stage {style}" x="{at.left:.1f}" y="{at.top:.1f}" '
    yield f'width="{at.width:.1f}" height="{at.height:.1f}" rx="8"/>\n'
    left, base = at.left + PADDING_PX, at.top + HEAD_PX - 6
    yield f'<text class="number" x="{left:.1f}" y="{base:.1f}">{stage.number}</text>\n'
    yield f'<text class="small" x="{at.right - PADDING_PX:.1f}" y="{base:.1f}" text-anchor="end">'
    yield f"{_escaped(stage.pool.name)}</text>\n"
    for line in box.lines:
        base += LINE_PX
        pieces = (f'<tspan class="small">{_escaped(t)}</tspan>' if small else _escaped(t) for t, small in line)
        yield f'<text x="{left:.1f}" y="{base:.1f}" xml:space="preserve">{"".join(pieces)}</text>\n'
    yield "</g>\n"


def _reason(box: ReasonBox, at: Rectangle) -> Iterator[str]:
    style = "reason side" if box.is_side_input else "reason"
    yield f"<g>{_tooltip(box.texts)}"
    yield f'<rect class="{style}" x="{at.left:.1f}" y="{at.top:.1f}" width="{at.width:.1f}" '
    yield f'height="{at.height:.1f}" rx="{min(at.height / 2, 11):.1f}"/>\n'
    middle = at.left + at.width / 2
    for index, line in enumerate(box.lines):
        base = at.top + 14.5 + index * (LINE_PX - 3)
        yield f'<text class="small" x="{middle:.1f}" y="{base:.1f}" text-anchor="middle">{_escaped(line)}</text>\n'
    yield "</g>\n"


def _link(link: Link, route: list[Point], drawn: Picture) -> str:
    reason = drawn.reasons.get(link.source) or drawn.reasons.get(link.target)
    style = "link inner" if link in drawn.inner_links else "link side" if reason and reason.is_side_input else "link"
    arrow = ' marker-end="url(#arrow)"' if link.target in drawn.stages else ""
    return f'<path class="{style}"{arrow} d="{"".join(_path(route))}"/>\n'


def _path(route: list[Point]) -> Iterator[str]:
    """Yield the commands of a path that goes straight down and in a curve to the side, in turn."""
    (x, y), *rest = route
    yield f"M{x:.1f} {y:.1f}"
    for index, (next_x, next_y) in enumerate(rest):
        if index % 2 == 0:
            yield f" V{next_y:.1f}"
        else:
            middle = (y + next_y) / 2
            yield f" C{x:.1f} {middle:.1f} {next_x:.1f} {middle:.1f} {next_x:.1f} {next_y:.1f}"
        x, y = next_x, next_y


def _escaped(text: str) -> str:
    """Escape ``text`` for XML. Replace control characters, which XML can't hold even when escaped."""
    return escape("".join(c if c == "\n" or unicodedata.category(c) not in ("Cc", "Cs") else "\ufffd" for c in text))


def _tooltip(lines: Iterable[str]) -> str:
    return f"<title>{_escaped(chr(10).join(lines))}</title>\n"


def _small(x: float, y: float, text: str) -> str:
    return f'<text class="small" x="{x}" y="{y}">{_escaped(text)}</text>\n'
