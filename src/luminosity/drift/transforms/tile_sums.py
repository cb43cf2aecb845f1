"""Sends rows to the tiles they are part of, and sums kernel values over each tile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.metrics import Metrics
from apache_beam.pvalue import TaggedOutput

from luminosity.drift.kernels import Kernel
from luminosity.drift.sums.bin_sums import bin_sums
from luminosity.drift.transforms.each_key import FAILED, Failure, Failures
from luminosity.drift.transforms.plan import Cutting, Part, Plan, Recipe, strip_of
from luminosity.drift.transforms.summary import HashedRows
from luminosity.errors import DriftError

__all__ = [
    "AddSums",
    "CutReference",
    "ScatterCurrent",
    "ScatterGrouped",
    "ScatterReference",
    "Sums",
    "TileDoFn",
    "reference_strips",
    "scatter_recipe",
    "split_failures",
]

Tile = tuple[Any, int, int]  # the key and two strips


@dataclass(frozen=True)
class Sums:
    """Sums of kernel values over pairs of bins, and the rows of each bin; or the failure of a key."""

    recipe: Recipe
    matrices: Any
    counts: Any
    failure: Failure | None = None


class CutReference(beam.DoFn):
    """Cuts the rows of the reference into strips by key, the same strips for all windows it is compared with."""

    def __init__(self, cutting: Cutting) -> None:
        self._cutting = cutting

    def process(self, element: tuple[Any, HashedRows], summaries: Any) -> Iterator[Any]:  # type: ignore[override]
        """Emit the rows of each strip under the key and the strip's number."""
        key, rows = element
        (summary,) = summaries[key]
        strips = strip_of(rows.hashes, self._cutting.of_sample(summary))
        for strip in sorted(set(strips.tolist())):
            yield (key, strip), rows.take(strips == strip)


class ScatterReference(beam.DoFn):
    """Prepares a strip of the reference as the plan says, and sends its rows to their tiles."""

    def __init__(self, is_shared: bool) -> None:
        self._is_shared = is_shared
        self._rows = Metrics.counter("MMDTest", "reference_rows")

    def process(self, element: tuple[tuple[Any, int], Plan], strips: Any) -> Iterator[Any]:  # type: ignore[override]
        """Send the rows of one strip to every tile that the strip is part of."""
        (key, strip), plan = element
        for rows in strips[None if self._is_shared else key, strip]:
            self._rows.inc(len(rows))
            yield from _scattered(key, plan, rows, of_reference=True)


class ScatterCurrent(beam.DoFn):
    """Prepares rows of the current sample, and sends them to their tiles. Rows of keys without a plan are dropped."""

    def __init__(self) -> None:
        self._rows = Metrics.counter("MMDTest", "current_rows")

    def process(self, element: tuple[Any, HashedRows], plans: Any) -> Iterator[Any]:  # type: ignore[override]
        """Send rows to every tile that their strips are part of, if their key has a plan."""
        key, rows = element
        for plan in plans[key]:
            self._rows.inc(len(rows))
            yield from _scattered(key, plan, rows, of_reference=False)


class ScatterGrouped(beam.DoFn):
    """Does the same with the rows of a key and its plan, if there is one, in one group."""

    def __init__(self) -> None:
        self._rows = Metrics.counter("MMDTest", "current_rows")

    def process(self, element: tuple[Any, Iterable[HashedRows | Plan]]) -> Iterator[Any]:  # type: ignore[override]
        """Send the rows of the group to every tile that their strips are part of."""
        key, group = element
        for plan in [each for each in group if isinstance(each, Plan)]:
            for rows in group:
                if isinstance(rows, HashedRows):
                    self._rows.inc(len(rows))
                    yield from _scattered(key, plan, rows, of_reference=False)


def scatter_recipe(element: tuple[Any, Plan]) -> Iterator[tuple[Tile, Recipe]]:
    """Send the recipe to every tile."""
    key, plan = element
    return (((key, *tile), plan.recipe) for tile in plan.strips.tiles())


def reference_strips(element: tuple[Any, Plan]) -> Iterator[tuple[tuple[Any, int], Plan]]:
    """Return the plan for each strip of the reference."""
    key, plan = element
    return (((key, strip), plan) for strip in range(plan.strips.reference))


class TileDoFn(beam.DoFn):
    """Computes the sums of a tile from the rows and the recipe that were sent to it."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._tiles = Metrics.counter("MMDTest", "tiles")

    def process(  # type: ignore[override]
        self, element: tuple[Any, Iterable[Any]], window: Any = beam.DoFn.WindowParam
    ) -> Iterator[tuple[Any, Sums]]:
        """Emit the sums of one tile, or report that a kernel failed. A tile with an empty strip emits nothing."""
        (key, first, second), sent = element
        recipe: Recipe | None = None
        by_strip: dict[int, list[Part]] = {first: [], second: []}
        for each in sent:
            if isinstance(each, Part):
                by_strip[each.strip].append(each)
            else:
                recipe = each
        if recipe is not None and all(by_strip.values()):  # A strip may have no rows.
            self._tiles.inc()
            y = _joined(by_strip[second]) if first != second else None
            try:
                sums = _sums(recipe, _joined(by_strip[first]), y)
            except DriftError as error:  # The kernel failed for these rows; other keys may succeed.
                sums = Sums(recipe, None, None, self._failures.of(error, key, window))
            yield key, sums


class AddSums(beam.CombineFn):
    """Adds the sums of the tiles of a key."""

    def create_accumulator(self) -> Sums | None:  # type: ignore[override]
        """Return None: the first tile decides the shape of the sums."""
        return None

    def add_input(self, mutable_accumulator: Sums | None, element: Sums) -> Sums:  # type: ignore[override]
        """Add one tile's sums."""
        return _added(mutable_accumulator, element)

    def merge_accumulators(self, accumulators: Iterable[Sums | None]) -> Sums | None:  # type: ignore[override]
        """Add partial sums of a key; a failure replaces all sums."""
        merged: Sums | None = None
        for each in accumulators:
            merged = merged if each is None else _added(merged, each)
        return merged

    def extract_output(self, accumulator: Sums | None) -> Sums:  # type: ignore[override]
        """Return the sums of all tiles, or the failure."""
        assert accumulator is not None, "a key is combined only if it has sums"
        return accumulator


def split_failures(element: tuple[Any, Sums]) -> Iterator[Any]:
    """Send a key whose sums failed to the output for failures."""
    key, sums = element
    yield element if sums.failure is None else TaggedOutput(FAILED, (key, sums.failure))


def _scattered(key: Any, plan: Plan, rows: HashedRows, of_reference: bool) -> Iterator[tuple[Tile, Part]]:
    for part in plan.parts(rows, of_reference):
        for tile in plan.strips.tiles_of(part.strip):
            yield (key, *tile), part


def _joined(parts: list[Part]) -> Part:
    bins = np.concatenate([part.bins for part in parts])
    return Part(parts[0].strip, bins, np.concatenate([part.rows for part in parts]))


def _sums(recipe: Recipe, x: Part, y: Part | None) -> Sums:
    bins = recipe.bins.all
    if y is None:
        matrices = _sums_within(recipe.kernels, recipe.offsets, x.rows, x.bins, bins)
        return Sums(recipe, matrices, np.bincount(x.bins, minlength=bins))
    matrices = _sums_between(recipe.kernels, recipe.offsets, (x.rows, y.rows), (x.bins, y.bins), bins)
    return Sums(recipe, matrices, np.zeros(bins, dtype=np.int64))


def _sums_within(kernels: Sequence[Kernel], offsets: Sequence[float], rows: Any, bins: Any, count: int) -> Any:
    """Return, for each kernel, the symmetric matrix of sums over ordered pairs of different rows, by pairs of bins."""
    return bin_sums(kernels, offsets, rows.__getitem__, bins, count)


def _sums_between(
    kernels: Sequence[Kernel], offsets: Sequence[float], rows: tuple[Any, Any], bins: tuple[Any, Any], count: int
) -> Any:
    """Return the same sums over pairs of a row of the first strip and a row of the second, in either order.

    Both strips may have rows of the same bin. The second strip temporarily gets bins of its own, to distinguish pairs
    of both strips from pairs within one.
    """
    both = np.concatenate(rows)
    apart = np.concatenate([bins[0], bins[1].astype(np.int64) + count])
    sums = bin_sums(kernels, offsets, both.__getitem__, apart, 2 * count, boundary=count)
    between = sums[:, :count, count:]
    return between + between.transpose(0, 2, 1)


def _added(first: Sums | None, second: Sums) -> Sums:
    if first is None:
        return second
    if first.failure is not None or second.failure is not None:  # Keep one of several failures, the same in any order.
        return min((first, second), key=_failed_first)
    return Sums(first.recipe, first.matrices + second.matrices, first.counts + second.counts)


def _failed_first(sums: Sums) -> tuple[bool, str]:
    return sums.failure is None, "" if sums.failure is None else sums.failure[1]
