"""The steps that ``MMD`` and ``MMDTest`` share.

::

    reference ─ Gather ─┬─ Summarise ─┬─ Cut ───────────────┐ (by key and strip)
                        └─────────────│──┘                  │
                                      │ (side input)        │ (side input)
    current ─── Gather ─┬─ Summarise ─┴─ Plan ─┬─ ScatterReference ─┐
                        │                      ├─ ScatterRecipe ────┼─ GroupByKey ─ SumTile ─ Add ─ (key, Sums)
                        └───────── ScatterCurrent ──────────────────┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import apache_beam as beam
from apache_beam.pvalue import AsMultiMap

from luminosity.drift.aggregate import Aggregate
from luminosity.drift.kernels import BlockKernel, Kernel
from luminosity.drift.transforms.elements import Reader
from luminosity.drift.transforms.failures import FAILED, Failures
from luminosity.drift.transforms.gather import Gather
from luminosity.drift.transforms.hashed_rows import HashedRows
from luminosity.drift.transforms.plan import Part, Plan, PlanDoFn, Planner, Recipe
from luminosity.drift.transforms.reference_source import Reference, ReferenceRows, check_reference, has_keys
from luminosity.drift.transforms.summary import Summarise, Summary
from luminosity.drift.transforms.tile_sums import (
    AddSums,
    CutReference,
    ScatterCurrent,
    ScatterReference,
    Sums,
    TileDoFn,
    reference_strips,
    scatter_recipe,
    split_failures,
)
from luminosity.errors import DriftError

__all__ = ["ComparisonSteps", "check_kernels"]

_MAIN = "right"  # the output of elements that did not fail


@dataclass(frozen=True)
class ComparisonSteps:
    """Compares a PCollection with a reference. ``reader`` reads the elements of the current sample."""

    reference: Reference
    reader: Reader
    planner: Planner
    seed: int

    def __post_init__(self) -> None:
        check_reference(self.reference, self.reader)

    def sums(self, current: Any, returns_failures: bool) -> tuple[Any, Any]:
        """Add the steps to the pipeline of ``current``. Returns the sums of each key, and the failures."""
        on_failure = Failures(self.reader.key_name, returns_failures)
        summarise = Summarise(with_sums=self.planner.components is not None)
        of_reference, strips = self._reference(current.pipeline, summarise)
        reader = replace(self.reader, seed=2 * self.seed + 1)
        rows = current | "Gather" >> Gather(reader)
        summaries = rows | "Summarise" >> _summaries(summarise)
        plan = beam.ParDo(
            PlanDoFn(self.planner, self._is_shared, on_failure),
            AsMultiMap(of_reference),
            AsMultiMap(strips),
        )
        plan.with_output_types(tuple[Any, Plan])
        plans, unplanned = summaries | "Plan" >> plan.with_outputs(FAILED, main=_MAIN)
        sums = self._added(rows, plans, strips, on_failure)
        if not returns_failures:
            return sums, unplanned
        part = beam.FlatMap(split_failures).with_output_types(tuple[Any, Sums])
        whole, failed = sums | "PartFailures" >> part.with_outputs(FAILED, main=_MAIN)
        return whole, (unplanned, failed) | "Failures" >> beam.Flatten()

    @property
    def _is_shared(self) -> bool:
        return not (self.reader.key_name is not None and has_keys(self.reference))

    def _reference(self, pipeline: Any, summarise: Summarise) -> tuple[Any, Any]:
        reader = replace(self.reader, seed=2 * self.seed)
        source = self.reference if isinstance(self.reference, beam.PCollection) else pipeline
        rows = source | "Reference" >> ReferenceRows(self.reference, reader)
        summaries = rows | "SummariseReference" >> _summaries(summarise)
        cut = beam.ParDo(CutReference(self.planner.cutting), AsMultiMap(summaries))
        return summaries, rows | "CutReference" >> cut.with_output_types(tuple[tuple[Any, int], HashedRows])

    def _added(self, rows: Any, plans: Any, strips: Any, on_failure: Failures) -> Any:
        tile = tuple[Any, int, int]
        of_reference = (
            plans
            | "ReferenceStrips" >> beam.FlatMap(reference_strips).with_output_types(tuple[tuple[Any, int], Plan])
            | "ShareStrips" >> beam.Reshuffle()
            | "ScatterReference"
            >> beam.ParDo(ScatterReference(self._is_shared), AsMultiMap(strips)).with_output_types(tuple[tile, Part])
        )
        of_current = rows | "ScatterCurrent" >> beam.ParDo(ScatterCurrent(), AsMultiMap(plans)).with_output_types(
            tuple[tile, Part]
        )
        recipes = plans | "ScatterRecipe" >> beam.FlatMap(scatter_recipe).with_output_types(tuple[tile, Recipe])
        return (
            (of_reference, of_current, recipes)
            | "Tiles" >> beam.Flatten().with_output_types(tuple[tile, Any])
            | "GroupTiles" >> beam.GroupByKey()
            | "SumTile" >> beam.ParDo(TileDoFn(on_failure)).with_output_types(tuple[Any, Sums])
            | "Add" >> beam.CombinePerKey(AddSums()).with_output_types(tuple[Any, Sums])
        )


def _summaries(summarise: Summarise) -> Any:
    return beam.CombinePerKey(summarise).with_output_types(tuple[Any, Summary])


def check_kernels(kernels: Sequence[Kernel | Aggregate]) -> None:
    """Raise an error for kernels that pipelines can't use."""
    if any(isinstance(kernel, BlockKernel) for kernel in kernels):
        raise DriftError(
            "found a BlockKernel, expected a kernel of rows: pipelines compare rows of numbers",
            fix="use mmd_test(), which takes BlockKernels",
        )
