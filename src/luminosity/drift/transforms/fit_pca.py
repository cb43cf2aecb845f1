"""Principal components of a collection."""

from __future__ import annotations

from typing import Any

import apache_beam as beam

from luminosity.drift.pca import PCA
from luminosity.drift.rows import is_whole
from luminosity.drift.transforms.columns import Columns
from luminosity.drift.transforms.gather import Gather
from luminosity.drift.transforms.reading import Reader
from luminosity.drift.transforms.summary import Summarise, Summary
from luminosity.errors import DriftError

__all__ = ["FitPCA"]


class FitPCA(beam.PTransform[Any, Any]):
    """The directions in which rows vary most: one `PCA`, or `(key, PCA)` pairs.

    >>> with beam.Pipeline(runner="FnApiRunner") as pipeline:
    ...     rows = pipeline | beam.Create([[0.0, 0.0], [0.0, 2.0], [1.0, 0.0], [1.0, 2.0]])
    ...     _ = rows | FitPCA(1) | beam.Map(lambda pca: print(pca.mean, pca.components))
    [0.5 1. ] [[0. 1.]]

    For a test, fit the rows of both samples together, `(reference, current) | beam.Flatten() | FitPCA(50)`: components
    of the reference alone tell the samples apart, and the level would not hold. `MMDTest(pca=50)` does so by itself.

    Args:
        components: how many.
        column: of record batches: the one with vectors, or several of numbers that are a vector together.
        by: the column with keys: components for each.
        keyed: elements are pairs of a key and rows.
    """

    def __init__(
        self, components: int, *, column: Columns | None = None, by: str | None = None, keyed: bool = False
    ) -> None:
        super().__init__()
        if not is_whole(components) or components < 1:
            raise DriftError(f"Found components={components}, expected 1 or more.")
        self._components = components
        self._reader = Reader(column, by=by, keyed=keyed)

    def expand(self, input_or_inputs: Any) -> Any:
        components, name = self._components, self._reader.key_name

        def fit(key: Any, summary: Summary) -> tuple[Any, PCA]:
            summary.check("The collection" if name is None else f"{name}={key!r}")
            assert summary.sums is not None, "it was asked for"
            return key, summary.sums.pca(components)

        fitted = (
            input_or_inputs
            | "Gather" >> Gather(self._reader)
            | "Sum" >> beam.CombinePerKey(Summarise(with_sums=True)).with_output_types(tuple[Any, Summary])
            | "Fit" >> beam.MapTuple(fit).with_output_types(tuple[Any, PCA])
        )
        return fitted if name is not None else fitted | "Values" >> beam.Values().with_output_types(PCA)
