"""The contents of a plan's picture: boxes with lines of text, the links between them, and their layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from luminosity.engine.explain.drawing.layers import Link
from luminosity.engine.explain.drawing.layout import Layout, Size, lay_out
from luminosity.engine.explain.drawing.lettering import text_width, wrapped
from luminosity.engine.explain.drawing.style import SMALL_PX, STEP_PX
from luminosity.engine.explain.explanation import Break, ExplainedStage, Explanation

__all__ = ["HEAD_PX", "LINE_PX", "PADDING_PX", "Picture", "ReasonBox", "StageBox", "picture"]


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
    stages = {_key(stage.number): StageBox(stage, tuple(_lines(stage))) for stage in plan.stages}
    reasons: dict[str, ReasonBox] = {}
    links: dict[Link, None] = {}
    for a_break in plan.breaks:
        if not a_break.inside:
            key = f"{a_break.buffer_id!r} {a_break.short}"
            known = reasons.get(key, ReasonBox((), (), a_break.is_side_input))
            reasons[key] = _with(known, a_break)
            links |= {Link(_key(writer), key): None for writer in a_break.writers}
            if a_break.reader is not None:
                links[Link(key, _key(a_break.reader))] = None
    inner = [Link(_key(writer), _key(reader), span=2) for writer, reader in _inner_pairs(plan)]
    sizes = {key: _stage_size(box) for key, box in stages.items()}
    sizes |= {key: _reason_size(box) for key, box in reasons.items()}
    return Picture(stages, reasons, frozenset(inner), lay_out(sizes, [*links, *inner]))


def _key(number: int) -> str:
    return f"stage {number}"


def _lines(stage: ExplainedStage) -> Iterator[tuple[Piece, ...]]:
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
