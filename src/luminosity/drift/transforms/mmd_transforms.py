"""Whether a collection still looks like the reference: a test in a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import apache_beam as beam
import numpy as np

from luminosity.drift.aggregate import Aggregate, as_kernels, one_kernel
from luminosity.drift.kernels import Kernel
from luminosity.drift.permutation.conclude import Settings, conclude
from luminosity.drift.permutation.permute import estimates, observed_side
from luminosity.drift.result import MMDTestResult
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
    """Whether rows come from the distribution of a reference: one `MMDTestResult`, or `(key, MMDTestResult)` pairs.

    >>> import numpy as np
    >>> random = np.random.default_rng(0)
    >>> reference, current = random.normal(size=(200, 3)), random.normal(1, 1, size=(200, 3))
    >>> with beam.Pipeline(runner="FnApiRunner") as pipeline:
    ...     rows = pipeline | beam.Create(list(current))
    ...     _ = rows | MMDTest(reference) | beam.Map(lambda result: print(result.drift, result.p_value < 0.01))
    True True

    The result is that of `mmd_test(..., ids=...)`, however the rows are spread over files, bundles and workers.
    Elements are vectors, matrices of rows, or, with ``column``, record batches. In fixed windows there is one result
    for each, at the window's end, all against one reference in the global window; rows of a batch are in its window.
    Triggers should be the default: a test is of all rows of its window.

    Args:
        reference: a PCollection of the same kind, which becomes a side input; an array; or a path of Parquet or npy
            files, which may have ``*`` in it. An array or npy file is the reference of every key. Of one with more
            than 1,023 times the rows of the current sample, so many are compared.
        kernel: one, or several, or an `Aggregate`, for one test that keeps its level. RBF at the median distance, if
            there is none.
        column: of record batches: the one with vectors, or several of numbers that are a vector together.
        id: the column with the rows' ids, whole numbers or texts, from which random bins come. Without it they come
            from the bytes of the row: then equal rows share a bin, which makes the test cautious where there are many.
        by: the column with keys: one test for each.
        keyed: elements are pairs of a key and one of the above.
        permutations: how many random partings of the bins the statistic is compared with.
        level: the rate of false alarms.
        seed: of bins and permutations.
        bins: of both samples together.
        precision: of the kernel's values; sums are always double.
        pca: so many principal components are compared, found for each test in both samples together: those of the
            reference alone would tell them apart.

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
        plan_bins(2, 2, bins)  # Says now what is wrong with their number.
        self._comparison = ComparisonSteps(
            reference, Reader(column, id, by, keyed), Planner(kernels, bins, precision, pca), seed
        )
        self._gives_failures = False

    def with_exception_handling(self) -> MMDTest:
        """Keys and windows that can't be tested don't end the pipeline: returns `(results, failures)`.

        A failure is as Beam has them: the key (None without keys), and a tuple of the exception's type, its text and
        its traceback. Such are: no rows in the reference, fewer than 2, NaN or null, rows of another width, a kernel
        that gives NaN for some pair of rows. What holds for all ends the pipeline: no such column, no numbers in it,
        an error in a kernel of your own.
        """
        self._gives_failures = True
        return self

    def expand(self, input_or_inputs: Any) -> Any:
        sums, failures = self._comparison.sums(input_or_inputs, self._gives_failures)
        settings = self._settings

        def concluded(element: tuple[Any, Sums]) -> Any:
            key, sums = element
            return key, conclude(sums.matrices, sums.counts, sums.recipe.bins, sums.recipe.kernels, settings)

        results = sums | "Conclude" >> beam.Map(concluded).with_output_types(tuple[Any, MMDTestResult])
        if self._comparison.reader.key_name is None:
            results = results | "Values" >> beam.Values().with_output_types(MMDTestResult)
        return (results, failures) if self._gives_failures else results


class MMD(beam.PTransform[Any, Any]):
    """The unbiased MMD² of rows and a reference, exact over all pairs: one float, or `(key, float)` pairs.

    >>> from luminosity.drift import RBF
    >>> with beam.Pipeline(runner="FnApiRunner") as pipeline:
    ...     rows = pipeline | beam.Create([[10.0], [11.0], [12.0]])
    ...     _ = rows | MMD([[0.0], [1.0], [2.0]], RBF(1.0)) | beam.Map(lambda mmd2: print(round(mmd2, 4)))
    0.8989

    `MMDTest` says whether that is more than chance. The arguments are as there.
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
        self._gives_failures = False

    def with_exception_handling(self) -> MMD:
        """As that of `MMDTest`."""
        self._gives_failures = True
        return self

    def expand(self, input_or_inputs: Any) -> Any:
        sums, failures = self._comparison.sums(input_or_inputs, self._gives_failures)
        results = sums | "Estimate" >> beam.MapTuple(lambda key, sums: (key, _estimate(sums))).with_output_types(
            tuple[Any, float]
        )
        if self._comparison.reader.key_name is None:
            results = results | "Values" >> beam.Values().with_output_types(float)
        return (results, failures) if self._gives_failures else results


def _estimate(sums: Sums) -> float:
    counts = np.asarray(sums.counts, dtype=np.float64)
    return float(estimates(sums.matrices[0], counts, observed_side(sums.recipe.bins)[None, :])[0])
