"""The test in a pipeline, ``MMDTest``, and the distance without a test, ``MMD``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import apache_beam as beam
import numpy as np

from luminosity.drift.aggregate import Aggregate, as_kernels, one_kernel
from luminosity.drift.kernels import Kernel
from luminosity.drift.mmd_result import MMDTestResult, untested
from luminosity.drift.permutation.conclude import Settings, conclude
from luminosity.drift.permutation.permute import estimates, observed_side
from luminosity.drift.rows import Precision, check_precision, check_seed
from luminosity.drift.sums.bins import BINS, plan_bins
from luminosity.drift.transforms.columns import Columns
from luminosity.drift.transforms.comparison import ComparisonSteps, check_kernels
from luminosity.drift.transforms.elements import Reader
from luminosity.drift.transforms.plan import Planner
from luminosity.drift.transforms.reference_source import Reference
from luminosity.drift.transforms.tile_sums import Sums

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
        check_kernels(kernels)
        plan_bins(2, 2, bins)  # Check the number now, not in a worker.
        self._comparison = ComparisonSteps(
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
        check_kernels(kernels)
        planner = Planner(kernels, None, precision, pca)
        self._comparison = ComparisonSteps(reference, Reader(column, id, by, keyed), planner, seed)
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
