"""Sums over one tile: the rows of a strip against those of another, or of itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.metrics import Metrics
from apache_beam.pvalue import TaggedOutput

from luminosity.drift.transforms.failures import FAILED, Failure, Failures
from luminosity.drift.transforms.plan import Part, Recipe
from luminosity.drift.transforms.strip_sums import sums_between, sums_within
from luminosity.errors import DriftError

__all__ = ["AddSums", "Sums", "TileDoFn", "part_failures"]


@dataclass(frozen=True)
class Sums:
    """Of kernel values for pairs of bins, and the rows of each bin; or why there are none."""

    recipe: Recipe
    matrices: Any
    counts: Any
    failure: Failure | None = None


class TileDoFn(beam.DoFn):
    """From a tile, and all that was sent to it, to its key and sums."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._tiles = Metrics.counter("MMDTest", "tiles")

    def process(  # type: ignore[override]
        self, element: tuple[Any, Iterable[Any]], window: Any = beam.DoFn.WindowParam
    ) -> Iterator[tuple[Any, Sums]]:
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
            y = _joined(by_strip[second]) if first != second else None
            try:
                sums = _sums(recipe, _joined(by_strip[first]), y)
            except DriftError as error:  # of the kernel for these rows: other keys' may be right
                sums = Sums(recipe, None, None, self._failures.of(error, key, window))
            yield key, sums


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


def part_failures(element: tuple[Any, Sums]) -> Iterator[Any]:
    """A key whose sums failed goes where those go that have no plan."""
    key, sums = element
    yield element if sums.failure is None else TaggedOutput(FAILED, (key, sums.failure))


def _added(first: Sums | None, second: Sums) -> Sums:
    if first is None:
        return second
    if first.failure is not None or second.failure is not None:  # Of several, one: the same whatever their order.
        return min((first, second), key=_failed_first)
    return Sums(first.recipe, first.matrices + second.matrices, first.counts + second.counts)


def _failed_first(sums: Sums) -> tuple[bool, str]:
    return sums.failure is None, "" if sums.failure is None else sums.failure[1]


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
