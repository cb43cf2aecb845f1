"""A plan as an SVG picture, which any browser shows: what its boxes say, their colours, and the markup."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from luminosity.engine.explain.explanation import Break, ExplainedStage, Explanation
from luminosity.engine.explain.layout import Layout, Link, Point, Rectangle, Size, lay_out
from luminosity.engine.explain.text import counted, machine_in_words, pool_in_words
from luminosity.engine.resources.pools import Pool

__all__ = ["picture", "svg", "text_width", "wrapped"]
# Widths as fractions of the font's size, a little more than common system fonts need.
_NARROW, _WIDE, _CAPITAL, _OTHER, _DOUBLE = 0.36, 0.92, 0.72, 0.6, 1.05
_NARROW_LETTERS = frozenset("ijlftr.,:;'|!()[]/\\ `-·")
_WIDE_LETTERS = frozenset("mwMW@%…")
_BREAKS_AFTER = frozenset(" /_-.:;,(=+")


def text_width(text: str, size: float) -> float:
    """Estimate the width of ``text`` in pixels, for a font of ``size`` pixels."""
    return size * sum(map(_letter_width, text))


def _letter_width(letter: str) -> float:
    if letter in _NARROW_LETTERS:
        return _NARROW
    if letter in _WIDE_LETTERS:
        return _WIDE
    if unicodedata.east_asian_width(letter) in "WF":
        return _DOUBLE
    return _CAPITAL if letter.isupper() else _OTHER


def wrapped(text: str, size: float, limit: float) -> list[str]:
    """Split ``text`` into lines no wider than ``limit`` pixels, after separators if possible.

    >>> wrapped("ReadFromText/Read", 10, 80)
    ['ReadFromText/', 'Read']
    """
    lines: list[str] = []
    line, width, cut = "", 0.0, 0  # cut: the line's length up to the last separator
    for letter in text:
        while line and width + text_width(letter, size) > limit:
            cut = cut or len(line)
            lines.append(line[:cut].rstrip())
            line = line[cut:].lstrip()
            width, cut = text_width(line, size), 0
        line += letter
        width += text_width(letter, size)
        if letter in _BREAKS_AFTER:
            cut = len(line)
    return [*lines, line] if line or not lines else lines


TITLE_PX, STEP_PX, SMALL_PX = 17, 13, 11
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
# Fill and stroke for light viewers, then for dark ones.
_PALETTE = (
    ("#e3eefc", "#2f6fc4", "#14304f", "#6aa5ee"),  # blue: the first CPU pool
    ("#fdecd8", "#c46a12", "#46290b", "#eea35a"),  # orange: the first pool with devices
    ("#e2f3e6", "#2f8a4e", "#10361f", "#63c487"),
    ("#efe6fb", "#7a4cc2", "#2f1d4d", "#b08ef0"),
    ("#dff2f2", "#1f8585", "#0c3535", "#5cc4c4"),
    ("#fde4ea", "#c23a5e", "#471424", "#f07f9d"),
)
_RESERVED = 2  # the first two colours are for these pools only
_LIGHT = f"""\
.background {{ fill: #ffffff }}
text {{ fill: #1f2937; font-size: {STEP_PX}px }}
.title {{ font-size: {TITLE_PX}px; font-weight: 600 }}
.number {{ font-weight: 700 }}
.small {{ font-size: {SMALL_PX}px; fill: #566173 }}
.stage {{ stroke-width: 1.5 }}
.reason {{ fill: #ffffff; stroke: #8a94a6 }}
.link {{ fill: none; stroke: #6b7587; stroke-width: 1.5 }}
.head {{ fill: #6b7587 }}
.side {{ stroke-dasharray: 5 4 }}
.inner {{ stroke-dasharray: 0.5 4; stroke-linecap: round }}
"""
_DARK = """\
.background { fill: #0f141b }
text { fill: #e6edf3 }
.small { fill: #a3afbf }
.reason { fill: #1c232d; stroke: #7d8899 }
.link { stroke: #94a0b2 }
.head { fill: #94a0b2 }
"""


def stylesheet() -> str:
    """Return the CSS of a picture; the viewer's colour scheme chooses between light and dark."""
    light = "".join(f".pool{i} {{ fill: {p[0]}; stroke: {p[1]} }}\n" for i, p in enumerate(_PALETTE))
    dark = "".join(f".pool{i} {{ fill: {p[2]}; stroke: {p[3]} }}\n" for i, p in enumerate(_PALETTE))
    return f"{_LIGHT}{light}@media (prefers-color-scheme: dark) {{\n{_DARK}{dark}}}\n"


def pool_classes(pools: Sequence[Pool]) -> list[str]:
    """Return the CSS class of each pool. The first CPU pool and the first device pool look alike in every picture."""
    chosen: list[int] = []
    for pool in pools:
        usual = 1 if pool.device_groups else 0
        others = len(_PALETTE) - _RESERVED
        chosen.append(_RESERVED + len(chosen) % others if usual in chosen else usual)
    return [f"pool{index}" for index in chosen]


LINE_PX, HEAD_PX, PADDING_PX = 18, 24, 12
_WIDEST_TEXT_PX, _WIDEST_REASON_PX = 220, 190
_NARROWEST_BOX_PX = 110
_BETWEEN_HEADINGS_PX = 24
_INDENT = "   "
# A piece of a line: its text and whether it is small print.
Piece = tuple[str, bool]


@dataclass(frozen=True)
class StageBox:
    """A stage, and the lines of text in its box."""

    stage: ExplainedStage
    lines: tuple[tuple[Piece, ...], ...]


@dataclass(frozen=True)
class ReasonBox:
    """A buffer between its writers and its readers, with the reason for it."""

    lines: tuple[str, ...]
    texts: tuple[str, ...]
    is_side_input: bool


@dataclass(frozen=True)
class Picture:
    """Everything that a drawing of a plan shows."""

    stages: dict[str, StageBox]
    reasons: dict[str, ReasonBox]
    inner_links: frozenset[Link]  # side inputs inside one of Beam's own steps
    layout: Layout


def picture(plan: Explanation) -> Picture:
    """Compose and lay out the picture of a plan."""
    stages = {_stage_key(stage.number): StageBox(stage, tuple(_stage_lines(stage))) for stage in plan.stages}
    reasons: dict[str, ReasonBox] = {}
    links: dict[Link, None] = {}
    for a_break in plan.breaks:
        if not a_break.inside:
            key = f"{a_break.buffer_id!r} {a_break.short}"
            known = reasons.get(key, ReasonBox((), (), a_break.is_side_input))
            reasons[key] = _with(known, a_break)
            links |= {Link(_stage_key(writer), key): None for writer in a_break.writers}
            if a_break.reader is not None:
                links[Link(key, _stage_key(a_break.reader))] = None
    inner = [Link(_stage_key(writer), _stage_key(reader), span=2) for writer, reader in _inner_pairs(plan)]
    sizes = {key: _stage_size(box) for key, box in stages.items()}
    sizes |= {key: _reason_size(box) for key, box in reasons.items()}
    return Picture(stages, reasons, frozenset(inner), lay_out(sizes, [*links, *inner]))


def _stage_key(number: int) -> str:
    return f"stage {number}"


def _stage_lines(stage: ExplainedStage) -> Iterator[tuple[Piece, ...]]:
    for step in stage.steps:
        first, *more = wrapped(step.name, STEP_PX, _WIDEST_TEXT_PX)
        lines: list[list[Piece]] = [[(first, False)], *([(_INDENT + line, False)] for line in more)]
        part = f" · {step.part}" if step.part else ""
        if text_width(lines[-1][0][0], STEP_PX) + text_width(part, SMALL_PX) <= _WIDEST_TEXT_PX:
            lines[-1].append((part, True))
        else:
            lines += ([(_INDENT + line, True)] for line in wrapped(step.part, SMALL_PX, _WIDEST_TEXT_PX))
        yield from map(tuple, lines)
    if not stage.steps:
        yield (("passes on what it reads", True),)
    if stage.is_stream:
        yield (("stream", True),)
    if stage.asks_for:
        yield from (((line, True),) for line in wrapped(stage.asks_for, SMALL_PX, _WIDEST_TEXT_PX))


def _stage_size(box: StageBox) -> Size:
    head = text_width(str(box.stage.number), STEP_PX) + text_width(box.stage.pool.name, SMALL_PX) + _BETWEEN_HEADINGS_PX
    widths = [sum(text_width(text, SMALL_PX if small else STEP_PX) for text, small in line) for line in box.lines]
    width = max([head, *widths]) + 2 * PADDING_PX
    return Size(max(width, _NARROWEST_BOX_PX), HEAD_PX + len(box.lines) * LINE_PX + PADDING_PX)


def _with(box: ReasonBox, a_break: Break) -> ReasonBox:
    lines = tuple(wrapped(a_break.short, SMALL_PX, _WIDEST_REASON_PX))
    texts = (*box.texts, *(reason.text for reason in a_break.reasons))
    return ReasonBox(lines, tuple(dict.fromkeys(texts)), box.is_side_input)


def _reason_size(box: ReasonBox) -> Size:
    width = max(text_width(line, SMALL_PX) for line in box.lines) + 2 * PADDING_PX
    return Size(width, len(box.lines) * (LINE_PX - 3) + 6, has_ports=False)


def _inner_pairs(plan: Explanation) -> Iterator[tuple[int, int]]:
    """Yield writer and reader of inner breaks, without those that a longer path between the same stages implies."""
    after: dict[int, set[int]] = {stage.number: set(plan.readers(stage)) for stage in plan.stages}
    reachable: dict[int, set[int]] = {}
    for stage in reversed(plan.stages):  # readers have higher numbers
        reachable[stage.number] = after[stage.number].union(*(reachable[number] for number in after[stage.number]))
    pairs = {(writer, b.reader) for b in plan.breaks if b.inside and b.reader for writer in b.writers}
    for writer, reader in sorted(pairs):
        if not any(reader in reachable[number] for number in after[writer]):
            yield writer, reader


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
