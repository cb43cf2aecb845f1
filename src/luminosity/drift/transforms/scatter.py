"""Rows, made ready, to every tile that they are part of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import apache_beam as beam
from apache_beam.metrics import Metrics

from luminosity.drift.transforms.block import Block
from luminosity.drift.transforms.plan import Part, Plan, Recipe
from luminosity.drift.transforms.strips import Cutting, strip_of

__all__ = ["CutReference", "ScatterCurrent", "ScatterReference", "reference_strips", "scatter_recipe"]

Tile = tuple[Any, int, int]  # the key and two strips


class CutReference(beam.DoFn):
    """Rows of the reference by key and strip. It is cut alike for all windows that it is compared with."""

    def __init__(self, cutting: Cutting) -> None:
        self._cutting = cutting

    def process(self, element: tuple[Any, Block], summaries: Any) -> Iterator[Any]:  # type: ignore[override]
        key, block = element
        (summary,) = summaries[key]
        strips = strip_of(block.hashes, self._cutting.of_sample(summary))
        for strip in sorted(set(strips.tolist())):
            yield (key, strip), block.take(strips == strip)


class ScatterReference(beam.DoFn):
    """From a key, one of its strips, and the plan."""

    def __init__(self, is_shared: bool) -> None:
        self._is_shared = is_shared
        self._rows = Metrics.counter("MMDTest", "reference_rows")

    def process(self, element: tuple[tuple[Any, int], Plan], strips: Any) -> Iterator[Any]:  # type: ignore[override]
        (key, strip), plan = element
        for block in strips[None if self._is_shared else key, strip]:
            self._rows.inc(len(block))
            yield from _scattered(key, plan, block, of_reference=True)


class ScatterCurrent(beam.DoFn):
    """From a key and a block. A key without a plan has failed: its rows go nowhere."""

    def __init__(self) -> None:
        self._rows = Metrics.counter("MMDTest", "current_rows")

    def process(self, element: tuple[Any, Block], plans: Any) -> Iterator[Any]:  # type: ignore[override]
        key, block = element
        for plan in plans[key]:
            self._rows.inc(len(block))
            yield from _scattered(key, plan, block, of_reference=False)


def scatter_recipe(element: tuple[Any, Plan]) -> Iterator[tuple[Tile, Recipe]]:
    """Every tile is told what to do."""
    key, plan = element
    return (((key, *tile), plan.recipe) for tile in plan.strips.tiles())


def reference_strips(element: tuple[Any, Plan]) -> Iterator[tuple[tuple[Any, int], Plan]]:
    key, plan = element
    return (((key, strip), plan) for strip in range(plan.strips.reference))


def _scattered(key: Any, plan: Plan, block: Block, of_reference: bool) -> Iterator[tuple[Tile, Part]]:
    for part in plan.parts(block, of_reference):
        for tile in plan.strips.tiles_of(part.strip):
            yield (key, *tile), part
