"""How far a collection is from the reference: the maximum mean discrepancy in a pipeline."""

from __future__ import annotations

from typing import Any

import apache_beam as beam
import numpy as np

from luminosity.drift.aggregate import one_kernel
from luminosity.drift.kernels import Kernel
from luminosity.drift.permute import estimates, observed_side
from luminosity.drift.rows import Precision, check_precision, check_seed
from luminosity.drift.transforms.columns import Columns
from luminosity.drift.transforms.compare import Comparison, check_kernels
from luminosity.drift.transforms.plan import Planner
from luminosity.drift.transforms.reading import Reader
from luminosity.drift.transforms.reference import Reference
from luminosity.drift.transforms.tile import Sums

__all__ = ["MMD"]


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
        self._comparison = Comparison(reference, Reader(column, id, by, keyed), planner, seed)
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
