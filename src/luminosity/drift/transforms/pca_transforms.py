"""Principal components in a pipeline: fit them to a PCollection, and project rows onto them."""

from __future__ import annotations

from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.pvalue import AsSingleton

from luminosity.drift.pca import PCA
from luminosity.drift.rows import is_whole
from luminosity.drift.transforms.columns import Columns, matrix_of
from luminosity.drift.transforms.elements import Gather, Reader
from luminosity.drift.transforms.summary import Summarise, Summary
from luminosity.errors import DriftError

__all__ = ["ApplyPCA", "FitPCA"]


class FitPCA(beam.PTransform[Any, Any]):
    """Fits the directions in which rows vary most. Returns one ``PCA``, or ``(key, PCA)`` pairs.

    >>> with beam.Pipeline(runner="FnApiRunner") as pipeline:
    ...     rows = pipeline | beam.Create([[0.0, 0.0], [0.0, 2.0], [1.0, 0.0], [1.0, 2.0]])
    ...     _ = rows | FitPCA(1) | beam.Map(lambda pca: print(pca.mean, pca.components))
    [0.5 1. ] [[0. 1.]]

    For a test, fit the rows of both samples together, ``(reference, current) | beam.Flatten() | FitPCA(50)``:
    components of the reference alone tell the samples apart, and the test would report drift too often.
    ``MMDTest(pca=50)`` fits both samples together.

    Args:
        components: the number of components.
        column: for record batches: the column of vectors, or several columns of numbers that form a vector together.
        by: for record batches: the column with keys; each key gets its own components.
        keyed: elements are pairs of a key and rows.
    """

    def __init__(
        self, components: int, *, column: Columns | None = None, by: str | None = None, keyed: bool = False
    ) -> None:
        super().__init__()
        if not is_whole(components) or components < 1:
            raise DriftError(f"found components={components}, expected a whole number from 1 on")
        self._components = components
        self._reader = Reader(column, by=by, keyed=keyed)

    def expand(self, input_or_inputs: Any) -> Any:
        """Sum up the rows of each key, and fit components to the sums."""
        components, name = self._components, self._reader.key_name

        def fit(key: Any, summary: Summary) -> tuple[Any, PCA]:
            summary.check("the collection" if name is None else f"{name}={key!r}")
            assert summary.sums is not None, "Summarise(with_sums=True) computes them"
            return key, summary.sums.pca(components)

        fitted = (
            input_or_inputs
            | "Gather" >> Gather(self._reader)
            | "Sum" >> beam.CombinePerKey(Summarise(with_sums=True)).with_output_types(tuple[Any, Summary])
            | "Fit" >> beam.MapTuple(fit).with_output_types(tuple[Any, PCA])
        )
        return fitted if name is not None else fitted | "Values" >> beam.Values().with_output_types(PCA)


class ApplyPCA(beam.PTransform[Any, Any]):
    """Projects rows onto components. Vectors become shorter vectors; a table gets one more column.

    >>> from luminosity.drift import FitPCA
    >>> rows = np.random.default_rng(0).normal(size=(100, 8))
    >>> with beam.Pipeline(runner="FnApiRunner") as pipeline:
    ...     table = pipeline | beam.Create([pa.record_batch({"embedding": list(rows)})])
    ...     pca = table | FitPCA(2, column="embedding")
    ...     projected = table | ApplyPCA(pca, column="embedding", output="short")
    ...     _ = projected | beam.Map(lambda batch: print(batch.schema.field("short").type))
    fixed_size_list<item: float>[2]

    Args:
        pca: a ``PCA``, or what ``FitPCA`` returns without keys.
        column: for record batches: the column of vectors, or several columns of numbers.
        output: for record batches: the name of the new column; it may be that of an existing one.
    """

    def __init__(self, pca: Any, *, column: Columns | None = None, output: str | None = None) -> None:
        super().__init__()
        if not isinstance(pca, PCA | beam.PCollection):
            raise DriftError(f"found pca={pca!r}, expected a PCA, or the PCollection that FitPCA returns")
        if (column is None) != (output is None):
            raise DriftError(f"found column={column!r} and output={output!r}, expected both, for tables, or neither")
        self._pca = pca
        self._reader = Reader(column)
        self._output = output

    def expand(self, input_or_inputs: Any) -> Any:
        """Project each element, with the fitted components as a side input."""
        reader, output = self._reader, self._output

        def project(element: Any, pca: PCA) -> Any:
            _, rows = reader.parted(element)
            if output is None:
                projected = pca.transform(rows)
                return projected if np.ndim(element) == 2 else projected[0]
            return _with_column(rows, reader.column or "", output, pca)

        pca = self._pca if isinstance(self._pca, PCA) else AsSingleton(self._pca)
        kind = np.ndarray if output is None else pa.RecordBatch
        return input_or_inputs | "Project" >> beam.Map(project, pca).with_output_types(kind)


def _with_column(batch: pa.RecordBatch, column: Columns, output: str, pca: PCA) -> pa.RecordBatch:
    matrix, wrong = matrix_of(batch, column)
    if wrong:
        place, what = next(iter(wrong.items()))
        raise DriftError(
            f"row {place} of a batch {what} in the column {column!r}, expected numbers",
            fix="leave out such rows before this step",
        )
    rows = matrix if len(matrix) else np.empty((0, len(pca.mean)))  # An empty batch does not know its width.
    projected = pca.transform(rows)
    values = pa.FixedSizeListArray.from_arrays(pa.array(projected.ravel()), projected.shape[1])
    if output in batch.schema.names:
        return batch.set_column(batch.schema.get_field_index(output), output, values)
    return batch.append_column(output, values)
