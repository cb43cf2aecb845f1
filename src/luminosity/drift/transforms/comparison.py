"""The steps that ``MMD`` and ``MMDTest`` share.

::

    reference ─ Gather ─┬─ Summarise ─┬─ Cut ───────────────┐ (by key and strip)
                        └─────────────│──┘                  │
                                      │ (side input)        │ (side input)
    current ─── Gather ─┬─ Summarise ─┴─ Plan ─┬─ ScatterReference ─┐
                        │                      ├─ ScatterRecipe ────┼─ GroupByKey ─ SumTile ─ Add ─ (key, Sums)
                        └───────── ScatterCurrent ──────────────────┘

In a stream, rows and plans meet in a ``GroupByKey`` before ``ScatterCurrent``, not as main and side input.

With keys, ``Plan`` also gets the keys that only the reference has, each with an empty summary (``MissingKeys``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import apache_beam as beam
from apache_beam.pvalue import AsIter, AsMultiMap
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.trigger import AfterWatermark, DefaultTrigger
from apache_beam.transforms.window import GlobalWindows

from luminosity.drift.aggregate import Aggregate
from luminosity.drift.kernels import BlockKernel, Kernel
from luminosity.drift.transforms.elements import Reader
from luminosity.drift.transforms.failures import FAILED, Failures
from luminosity.drift.transforms.gather import Gather
from luminosity.drift.transforms.hashed_rows import HashedRows
from luminosity.drift.transforms.plan import UNTESTED, Part, Plan, PlanDoFn, Planner, Recipe
from luminosity.drift.transforms.reference_source import Reference, ReferenceRows, check_reference, has_keys
from luminosity.drift.transforms.summary import Summarise, Summary
from luminosity.drift.transforms.tile_sums import (
    AddSums,
    CutReference,
    ScatterCurrent,
    ScatterGrouped,
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

    def sums(self, current: Any, returns_failures: bool, reports_untested: bool) -> tuple[Any, Any, Any]:
        """Add the steps to the pipeline of ``current``. Returns sums by key, untested keys, and failures.

        Untested keys come with the numbers of rows of the reference and of the current sample, one of which is below
        two. Unless ``reports_untested`` is true, they are failures.
        """
        current = _in_whole_windows(current)
        on_failure = Failures(self.reader.key_name, returns_failures)
        summarise = Summarise(with_sums=self.planner.components is not None)
        of_reference, strips = self._reference(current.pipeline, summarise)
        reader = replace(self.reader, seed=2 * self.seed + 1)
        rows = current | "Gather" >> Gather(reader)
        summaries = rows | "Summarise" >> _summaries(summarise)
        if not self._is_shared:
            missing = summaries | "MissingKeys" >> _MissingKeys(of_reference)
            summaries = (summaries, missing) | "OrMissing" >> beam.Flatten()
        plan = beam.ParDo(
            PlanDoFn(self.planner, self._is_shared, reports_untested, on_failure),
            AsMultiMap(of_reference),
            AsMultiMap(strips),
        )
        plan.with_output_types(tuple[Any, Plan])
        plans, untested, unplanned = summaries | "Plan" >> plan.with_outputs(UNTESTED, FAILED, main=_MAIN)
        sums = self._added(rows, plans, strips, on_failure)
        if not returns_failures:
            return sums, untested, unplanned
        part = beam.FlatMap(split_failures).with_output_types(tuple[Any, Sums])
        whole, failed = sums | "PartFailures" >> part.with_outputs(FAILED, main=_MAIN)
        return whole, untested, (unplanned, failed) | "Failures" >> beam.Flatten()

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
        if rows.is_bounded:
            scatter = beam.ParDo(ScatterCurrent(), AsMultiMap(plans)).with_output_types(tuple[tile, Part])
            of_current = rows | "ScatterCurrent" >> scatter
        else:
            # In a stream, rows wait for their plan with their window, not in front of a step with a side input.
            of_current = (
                (rows, plans)
                | "RowsAndPlans" >> beam.Flatten().with_output_types(tuple[Any, Any])
                | "WithPlan" >> beam.GroupByKey()
                | "ScatterCurrent" >> beam.ParDo(ScatterGrouped()).with_output_types(tuple[tile, Part])
            )
        recipes = plans | "ScatterRecipe" >> beam.FlatMap(scatter_recipe).with_output_types(tuple[tile, Recipe])
        return (
            (of_reference, of_current, recipes)
            | "Tiles" >> beam.Flatten().with_output_types(tuple[tile, Any])
            | "GroupTiles" >> beam.GroupByKey()
            | "SumTile" >> beam.ParDo(TileDoFn(on_failure)).with_output_types(tuple[Any, Sums])
            | "Add" >> beam.CombinePerKey(AddSums()).with_output_types(tuple[Any, Sums])
        )


class _MissingKeys(beam.PTransform[Any, Any]):
    """Finds the keys that the reference has and the current sample lacks, in each window that has rows.

    Keys are compared by a ``GroupByKey``, because only coders know which keys are equal. In the global window, all keys
    of the reference are missing if the current sample has no rows.
    """

    def __init__(self, of_reference: Any) -> None:
        super().__init__()
        self._of_reference = of_reference

    def expand(self, input_or_inputs: Any) -> Any:
        """Group the keys of both samples in each window, and emit those without a mark of the current sample."""
        marks = tuple[Any, bool]
        count = beam.CombineGlobally(beam.combiners.CountCombineFn())
        if not isinstance(input_or_inputs.windowing.windowfn, GlobalWindows):
            count = count.without_defaults()
        keys = AsIter(self._of_reference | "ReferenceKeys" >> beam.Keys())
        expected = (
            input_or_inputs
            | "Windows" >> count
            | "Expected" >> beam.FlatMap(lambda _, keys: [(key, False) for key in keys], keys).with_output_types(marks)
        )
        found = input_or_inputs | "Found" >> beam.Map(lambda pair: (pair[0], True)).with_output_types(marks)
        return (
            (expected, found)
            | "Both" >> beam.Flatten()
            | "ByKey" >> beam.GroupByKey()
            | "Missing"
            >> beam.FlatMap(lambda pair: [] if any(pair[1]) else [(pair[0], Summary())]).with_output_types(
                tuple[Any, Summary]
            )
        )


def _in_whole_windows(current: Any) -> Any:
    """Return a stream with windows that end once: a test needs all rows of its window, and comes at its end.

    Rows that come later are dropped, whatever lateness the windows allow.
    """
    windowing = current.windowing
    if current.is_bounded:
        return current
    fix = "apply beam.WindowInto(FixedWindows(60)) first, which gives a result for every minute"
    if isinstance(windowing.windowfn, GlobalWindows):
        raise DriftError(
            "found a stream in the global window, expected windows that end: a test needs all rows of its window",
            fix=fix,
        )
    trigger = windowing.triggerfn
    is_at_end = isinstance(trigger, AfterWatermark) and trigger.early is None and trigger.late is None
    if not is_at_end and not isinstance(trigger, DefaultTrigger):
        raise DriftError(
            f"found windows with the trigger {trigger}, expected the default: a test needs all rows of its window",
            fix=fix,
        )
    return current | "WholeWindows" >> _WholeWindows(_Same())


class _Same(beam.DoFn):
    def process(self, element: Any) -> Iterator[Any]:
        yield element


class _WholeWindows(beam.ParDo):
    """A ParDo whose output has the windows of its input, each with one pane."""

    def get_windowing(self, inputs: Any) -> Windowing:
        windowing = inputs[0].windowing
        return Windowing(windowing.windowfn, timestamp_combiner=windowing.timestamp_combiner)


def _summaries(summarise: Summarise) -> Any:
    return beam.CombinePerKey(summarise).with_output_types(tuple[Any, Summary])


def check_kernels(kernels: Sequence[Kernel | Aggregate]) -> None:
    """Raise an error for kernels that pipelines can't use."""
    if any(isinstance(kernel, BlockKernel) for kernel in kernels):
        raise DriftError(
            "found a BlockKernel, expected a kernel of rows: pipelines compare rows of numbers",
            fix="use mmd_test(), which takes BlockKernels",
        )
