"""Rows of a collection, seen along principal components."""

from __future__ import annotations

from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.pvalue import AsSingleton

from luminosity.drift.pca import PCA
from luminosity.drift.transforms.columns import Columns, matrix_of
from luminosity.drift.transforms.reading import Reader
from luminosity.errors import DriftError

__all__ = ["ApplyPCA"]


class ApplyPCA(beam.PTransform[Any, Any]):
    """Projects rows onto components: vectors to shorter ones, or, of a table, with one more column.

    >>> from luminosity.drift import FitPCA
    >>> rows = np.random.default_rng(0).normal(size=(100, 8))
    >>> with beam.Pipeline(runner="FnApiRunner") as pipeline:
    ...     table = pipeline | beam.Create([pa.record_batch({"embedding": list(rows)})])
    ...     pca = table | FitPCA(2, column="embedding")
    ...     projected = table | ApplyPCA(pca, column="embedding", output="short")
    ...     _ = projected | beam.Map(lambda batch: print(batch.schema.field("short").type))
    fixed_size_list<item: float>[2]

    Args:
        pca: a `PCA`, or what `FitPCA` gives without keys.
        column: of record batches: where the vectors are.
        output: of record batches: the new column; it may be the same one.
    """

    def __init__(self, pca: Any, *, column: Columns | None = None, output: str | None = None) -> None:
        super().__init__()
        if not isinstance(pca, PCA | beam.PCollection):
            raise DriftError(f"Found pca={pca!r}, expected a PCA, or the PCollection with one that FitPCA gives.")
        if (column is None) != (output is None):
            raise DriftError(f"Found column={column!r} and output={output!r}, expected both, for tables, or neither.")
        self._pca = pca
        self._reader = Reader(column)
        self._output = output

    def expand(self, input_or_inputs: Any) -> Any:
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
        raise DriftError(f"The column {column!r}: row {place} of a batch {what}. Leave such rows out before.")
    rows = matrix if len(matrix) else np.empty((0, len(pca.mean)))  # An empty list says nothing of its width.
    projected = pca.transform(rows)
    values = pa.FixedSizeListArray.from_arrays(pa.array(projected.ravel()), projected.shape[1])
    if output in batch.schema.names:
        return batch.set_column(batch.schema.get_field_index(output), output, values)
    return batch.append_column(output, values)
