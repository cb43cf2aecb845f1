"""Sums over one tile: the rows of a strip against those of another, or of itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.metrics import Metrics

from luminosity.drift.transforms.plan import Part, Recipe
from luminosity.drift.transforms.strip_sums import sums_between, sums_within

__all__ = ["AddSums", "Sums", "TileDoFn"]


@dataclass(frozen=True)
class Sums:
    """Of kernel values for pairs of bins, and the rows of each bin."""

    recipe: Recipe
    matrices: Any
    counts: Any


class TileDoFn(beam.DoFn):
    """From a tile, and all that was sent to it, to its key and sums."""

    def __init__(self) -> None:
        self._tiles = Metrics.counter("MMDTest", "tiles")

    def process(self, element: tuple[Any, Iterable[Any]]) -> Iterator[tuple[Any, Sums]]:  # type: ignore[override]
        (key, first, second), sent = element
        recipe: Recipe | None = None
        by_strip: dict[int, list[Part]] = {first: [], second: []}
        for thing in sent:
            if isinstance(thing, Part):
                by_strip[thing.strip].append(thing)
            else:
                recipe = thing
        if recipe is not None and all(by_strip.values()):  # A strip may happen to have no rows.
            self._tiles.inc()
            yield key, _sums(recipe, _joined(by_strip[first]), _joined(by_strip[second]) if first != second else None)


class AddSums(beam.CombineFn):
    def create_accumulator(self) -> Sums | None:  # type: ignore[override]
        return None

    def add_input(self, mutable_accumulator: Sums | None, element: Sums) -> Sums:  # type: ignore[override]
        return _added(mutable_accumulator, element)

    def merge_accumulators(self, accumulators: Iterable[Sums | None]) -> Sums | None:  # type: ignore[override]
        merged: Sums | None = None
        for each in accumulators:
            merged = merged if each is None else _added(merged, each)
        return merged

    def extract_output(self, accumulator: Sums | None) -> Sums:  # type: ignore[override]
        assert accumulator is not None, "nothing is combined by key but where there is something"
        return accumulator


def _added(first: Sums | None, second: Sums) -> Sums:
    if first is None:
        return second
    return Sums(first.recipe, first.matrices + second.matrices, first.counts + second.counts)


def _sums(recipe: Recipe, x: Part, y: Part | None) -> Sums:
    bins = recipe.bins.all
    if y is None:
        matrices = sums_within(recipe.kernels, recipe.offsets, x.rows, x.bins, bins)
        return Sums(recipe, matrices, np.bincount(x.bins, minlength=bins))
    matrices = sums_between(recipe.kernels, recipe.offsets, (x.rows, y.rows), (x.bins, y.bins), bins)
    return Sums(recipe, matrices, np.zeros(bins, dtype=np.int64))


def _joined(parts: list[Part]) -> Part:
    bins = np.concatenate([part.bins for part in parts])
    return Part(parts[0].strip, bins, np.concatenate([part.rows for part in parts]))
