"""The test in a pipeline, ``MMDTest``, and the distance without a test, ``MMD``. Both have these steps:

::

    reference ─ Gather ─┬─ Summarise ─┬─ Cut ───────────────┐ (by key and strip)
                        └─────────────│──┘                  │
                                      │ (side input)        │ (side input)
    current ─── Gather ─┬─ Summarise ─┴─ Plan ─┬─ ScatterReference ─┐
                        │                      ├─ ScatterRecipe ────┼─ GroupByKey ─ SumTile ─ Add ─ (key, Sums)
                        └───────── ScatterCurrent ──────────────────┘

In a stream, rows and plans meet in a ``GroupByKey`` before ``ScatterCurrent``, not as main and side input. With keys,
``Plan`` also gets the keys that only the reference has, each with an empty summary (``MissingKeys``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.pvalue import AsMultiMap
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.trigger import AfterWatermark, DefaultTrigger
from apache_beam.transforms.window import GlobalWindows

from luminosity.drift.kernels import Aggregate, BlockKernel, Kernel, as_kernels, one_kernel
from luminosity.drift.mmd.mmd_result import MMDTestResult, untested
from luminosity.drift.mmd.permutations import Settings, conclude, estimates, observed_side
from luminosity.drift.rows import Precision, check_precision, check_seed
from luminosity.drift.sums.bins import BINS, plan_bins
from luminosity.drift.transforms.columns import Columns
from luminosity.drift.transforms.each_key import FAILED, Failures, MissingKeys
from luminosity.drift.transforms.elements import Gather, Reader
from luminosity.drift.transforms.plan import UNTESTED, Part, Plan, PlanDoFn, Planner, Recipe
from luminosity.drift.transforms.reference_source import Reference, ReferenceRows, check_reference, has_keys
from luminosity.drift.transforms.summary import HashedRows, Summarise, Summary
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

__all__ = ["MMD", "MMDTest"]


class MMDTest(beam.PTransform[Any, Any]):
    """Tests whether rows come from the same distribution as a reference.

    Returns one ``MMDTestResult``, or ``(key, MMDTestResult)`` pairs. A key that only one sample has is drift, too: the
    ``verdict`` of its result is ``"gone"`` if the current sample lacks it, ``"new"`` if the reference does.

    >>> import numpy as np
    >>> random = np.random.default_rng(0)
    >>> reference, current = random.normal(size=(200, 3)), random.normal(1, 1, size=(200, 3))
    >>> with beam.Pipeline(runner="FnApiRunner") as pipeline:
    ...     rows = pipeline | beam.Create(list(current))
    ...     _ = rows | MMDTest(reference) | beam.Map(lambda result: print(result.drift, result.p_value < 0.01))
    True True

    The result is that of ``mmd_test(..., ids=...)``, however the rows are distributed over files, bundles and workers.
    Elements are vectors, matrices of rows, or, with ``column``, record batches. With fixed windows there is one result
    per window, at its end, all against one reference in the global window; a batch belongs to one window with all of
    its rows. Keep the default trigger: a test needs all rows of its window. In a stream, the result of a window comes
    when the watermark passes its end, and rows that come after that are dropped.

    Args:
        reference: a PCollection of the same kind, which becomes a side input; an array; or a path of Parquet or
            ``.npy`` files, which may have ``*`` in it. An array or ``.npy`` file is the reference of every key. At most
            1,023 times as many rows as the current sample has are compared.
        kernel: one kernel, or several, or an ``Aggregate``; all make one test that keeps its level. The default is
            ``RBF`` with the median distance.
        column: for record batches: the column of vectors, or several columns of numbers that form a vector together.
        id: for record batches: the column with the rows' ids, whole numbers or texts, which random bins come from.
            Without it, bins come from the bytes of the row: equal rows then share a bin, and with many of them the
            test detects less.
        by: for record batches: the column with keys; there is one result for each key of either sample. With windows,
            a key of the reference is gone in each window that has rows of other keys only.
        keyed: elements are pairs of a key and one of the above.
        permutations: how many random permutations of the bins the statistic is compared with.
        level: the false-alarm rate: how often drift is reported when there is none.
        seed: the seed of bins and permutations.
        bins: the number of bins of both samples together.
        precision: the precision of the kernel's values; sums are always double.
        pca: compare this many principal components, fitted for each test to both samples together. A test with
          fewer rows has as many components as rows.

    Counters: ``reference_rows``, ``current_rows``, ``tiles``.
    """

    def __init__(
        self,
        reference: Reference,
        kernel: Kernel | Aggregate | Sequence[Kernel | Aggregate] | None = None,
        *,
        column: Columns | None = None,
        id: str | None = None,
        by: str | None = None,
        keyed: bool = False,
        permutations: int = 1000,
        level: float = 0.05,
        seed: int = 0,
        bins: int = BINS,
        precision: Precision = "float32",
        pca: int | None = None,
    ) -> None:
        super().__init__()
        self._settings = Settings(permutations, level, seed, precision)
        kernels = as_kernels(kernel)
        _check_kernels(kernels)
        plan_bins(2, 2, bins)  # Check the number now, not in a worker.
        self._comparison = _Steps(
            reference, Reader(column, id, by, keyed), Planner(kernels, bins, precision, pca), seed
        )
        self._returns_failures = False

    def with_exception_handling(self) -> MMDTest:
        """Return ``(results, failures)``: keys and windows that can't be tested no longer fail the pipeline.

        A failure has the form that Beam uses: the key (None without keys), and a tuple of the exception's type, its
        text and its traceback. These are failures: NaN or null, rows of another width, a kernel that gives NaN for
        some pair of rows, and without keys fewer than 2 rows. Errors that concern all keys still fail the pipeline: a
        missing column, a column without numbers, an exception in a kernel of your own.
        """
        self._returns_failures = True
        return self

    def expand(self, input_or_inputs: Any) -> Any:
        """Sum the kernels over all pairs of rows, and test each key by permuting the bins."""
        has_keys = self._comparison.reader.key_name is not None
        sums, untested_keys, failures = self._comparison.sums(
            input_or_inputs, self._returns_failures, reports_untested=has_keys
        )
        settings = self._settings

        def concluded(element: tuple[Any, Sums]) -> Any:
            key, sums = element
            return key, conclude(sums.matrices, sums.counts, sums.recipe.bins, sums.recipe.kernels, settings)

        kind = tuple[Any, MMDTestResult]
        results = sums | "Conclude" >> beam.Map(concluded).with_output_types(kind)
        if has_keys:
            others = beam.MapTuple(lambda key, rows: (key, untested(*rows, **asdict(settings)))).with_output_types(kind)
            results = (results, untested_keys | "Untested" >> others) | "AllKeys" >> beam.Flatten()
        else:
            results = results | "Values" >> beam.Values().with_output_types(MMDTestResult)
        return (results, failures) if self._returns_failures else results


class MMD(beam.PTransform[Any, Any]):
    """Computes the unbiased MMD² of rows and a reference, exact over all pairs.

    Returns one float, or ``(key, float)`` pairs.

    >>> from luminosity.drift import RBF
    >>> with beam.Pipeline(runner="FnApiRunner") as pipeline:
    ...     rows = pipeline | beam.Create([[10.0], [11.0], [12.0]])
    ...     _ = rows | MMD([[0.0], [1.0], [2.0]], RBF(1.0)) | beam.Map(lambda mmd2: print(round(mmd2, 4)))
    0.8989

    ``MMDTest`` says whether that is more than chance explains. The arguments are the same. A key that only one sample
    has fails, because it has no distance.
    """

    def __init__(
        self,
        reference: Reference,
        kernel: Kernel | None = None,
        *,
        column: Columns | None = None,
        id: str | None = None,
        by: str | None = None,
        keyed: bool = False,
        seed: int = 0,
        precision: Precision = "float32",
        pca: int | None = None,
    ) -> None:
        super().__init__()
        check_precision(precision)
        check_seed(seed)
        kernels = one_kernel(kernel)
        _check_kernels(kernels)
        planner = Planner(kernels, None, precision, pca)
        self._comparison = _Steps(reference, Reader(column, id, by, keyed), planner, seed)
        self._returns_failures = False

    def with_exception_handling(self) -> MMD:
        """Return ``(results, failures)``, as ``MMDTest.with_exception_handling`` does."""
        self._returns_failures = True
        return self

    def expand(self, input_or_inputs: Any) -> Any:
        """Sum the kernel over all pairs of rows, and estimate the MMD² of each key."""
        sums, _, failures = self._comparison.sums(input_or_inputs, self._returns_failures, reports_untested=False)
        results = sums | "Estimate" >> beam.MapTuple(lambda key, sums: (key, _estimate(sums))).with_output_types(
            tuple[Any, float]
        )
        if self._comparison.reader.key_name is None:
            results = results | "Values" >> beam.Values().with_output_types(float)
        return (results, failures) if self._returns_failures else results


def _estimate(sums: Sums) -> float:
    counts = np.asarray(sums.counts, dtype=np.float64)
    return float(estimates(sums.matrices[0], counts, observed_side(sums.recipe.bins)[None, :])[0])


_MAIN = "right"  # the output of elements that did not fail


@dataclass(frozen=True)
class _Steps:
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
            missing = summaries | "MissingKeys" >> MissingKeys(of_reference, Summary())
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


def _check_kernels(kernels: Sequence[Kernel | Aggregate]) -> None:
    """Raise an error for kernels that pipelines can't use."""
    if any(isinstance(kernel, BlockKernel) for kernel in kernels):
        raise DriftError(
            "found a BlockKernel, expected a kernel of rows: pipelines compare rows of numbers",
            fix="use mmd_test(), which takes BlockKernels",
        )
