"""A plan in the DOT language, for Graphviz."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from luminosity.engine.explain.drawing.words import pool_in_words
from luminosity.engine.explain.explanation import ExplainedStage, Explanation

__all__ = ["dot"]


_HEAD = """\
digraph plan {
  rankdir=TB; fontname="sans-serif"; node [shape=box, style="rounded,filled", fillcolor=white, fontname="sans-serif"];
  edge [fontname="sans-serif", fontsize=11];
"""


def dot(plans: Mapping[str, Explanation]) -> str:
    """Return one digraph with a cluster for each pipeline and pool, and an edge for each break."""
    lines = [line for number, item in enumerate(plans.items(), start=1) for line in _pipeline(number, *item)]
    return _HEAD + "".join(f"  {line}\n" for line in lines) + "}\n"


def _pipeline(number: int, title: str, plan: Explanation) -> Iterator[str]:
    yield f"subgraph cluster_{number} {{"
    yield f"  label={_quoted(title)};"
    for index, pool in enumerate(plan.pools):
        yield f"  subgraph cluster_{number}_{index} {{"
        yield f"    label={_quoted(pool_in_words(pool))};"
        for stage in plan.stages:
            if stage.pool is pool:
                yield f"    s{number}_{stage.number} [label={_quoted(*_lines(stage))}];"
        yield "  }"
    for index, a_break in enumerate(plan.breaks):
        reader = f"s{number}_{a_break.reader}"
        if a_break.reader is None:
            reader = f"unread{number}_{index}"
            yield f'  {reader} [label="nothing reads it", style=dashed];'
        style = ", style=dashed" if a_break.is_side_input else ""
        for writer in a_break.writers:
            yield f"  s{number}_{writer} -> {reader} [label={_quoted(a_break.short)}{style}];"
    yield "}"


def _lines(stage: ExplainedStage) -> Iterator[str]:
    yield str(stage.number)
    for step in stage.steps:
        yield f"{step.name} · {step.part}" if step.part else step.name
    if stage.is_stream:
        yield "(stream)"


def _quoted(*lines: str) -> str:
    r"""
    >>> _quoted('say "a"', "b\\c")
    '"say \\"a\\"\\nb\\\\c"'
    """
    escaped = (line.replace("\\", r"\\").replace('"', r"\"").replace("\n", " ") for line in lines)
    return '"' + r"\n".join(escaped) + '"'
