"""The test of each column in a pipeline, ``ColumnTest``.

Each sample becomes a summary for each key, and a summary of the current sample is compared with that of the reference,
which is a side input by key. Keys that only the reference has are added with an empty summary (``MissingKeys``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.pvalue import AsMultiMap, TaggedOutput

from luminosity.drift.column_result import ColumnTestResult, compare_columns, untested_columns
from luminosity.drift.transforms.each_key import FAILED, Failures, MissingKeys
from luminosity.drift.transforms.reference_source import ReadFiles
from luminosity.errors import DriftError
from luminosity.evaluation.columns import codes_of, column_of, plain_value, row_as_dict
from luminosity.evaluation.description.describe_table import DescriptionState, SummariseFn, state_of
from luminosity.evaluation.evaluate_table import combined

__all__ = ["ColumnTest", "rows_by_key"]

_FEWEST_ROWS = 2  # of a key in each sample, to be tested


class ColumnTest(beam.PTransform[Any, Any]):
    """Tests for each column of a table whether it has drifted from a reference, in one pass and bounded memory.

    Returns one ``ColumnTestResult``, or ``(key, ColumnTestResult)`` pairs. A key that only one sample has is drift,
    too: its ``verdict`` is ``"gone"`` or ``"new"``.

    >>> with beam.Pipeline(runner="FnApiRunner") as pipeline:
    ...     rows = pipeline | beam.Create([{"age": age} for age in range(50, 100)])
    ...     _ = rows | ColumnTest({"age": range(50)}) | beam.Map(lambda result: print(result.drift, result.drifted))
    True ['age']

    Elements are record batches, or rows: dicts, Beam Rows, NamedTuples or dataclasses. The result is that of
    ``column_test``, however the rows are distributed over bundles and workers. With windows, there is one result for
    each window, all against one reference.

    Args:
        reference: a PCollection of the same kind; a path of Parquet files, which may have ``*`` in it; or a table in
            memory, which is summarised when the pipeline is built.
        column: the columns to compare; by default all.
        by: the column with keys; there is one result for each key of either sample. A worker holds the summaries of
            one key at a time: at most some megabytes for each column.
        level: the false-alarm rate of all columns together.
    """

    def __init__(
        self, reference: Any, *, column: str | Sequence[str] | None = None, by: str | None = None, level: float = 0.05
    ) -> None:
        super().__init__()
        if not 0 < level < 1:
            raise DriftError(f"found level={level}, expected a number between 0 and 1, such as 0.05")
        self._columns = None if column is None else (column,) if isinstance(column, str) else tuple(column)
        self._by = by
        self._level = level
        is_lazy = isinstance(reference, (beam.PCollection, str, os.PathLike))
        self._reference = reference if is_lazy else self._in_memory(reference)
        self._returns_failures = False

    def with_exception_handling(self) -> ColumnTest:
        """Return ``(results, failures)``: windows and keys that can't be tested no longer fail the pipeline.

        A failure has the form that Beam uses: the key (None without keys), and a tuple of the exception's type, its
        text and its traceback. Without keys, a sample with fewer than 2 rows is a failure. Errors that concern all keys
        still fail the pipeline: a missing column, a row without a key.
        """
        self._returns_failures = True
        return self

    def expand(self, input_or_inputs: Any) -> Any:
        """Summarise both tables, and compare their columns."""
        reference = self._of_reference(input_or_inputs.pipeline)
        current = self._summaries(input_or_inputs, "")
        if self._by is not None:
            missing = current | "MissingKeys" >> MissingKeys(reference, DescriptionState(self._columns))
            current = (current, missing) | "OrMissing" >> beam.Flatten()
        compare = _Compare(self._level, Failures(self._by, self._returns_failures))
        steps = beam.ParDo(compare, AsMultiMap(reference)).with_output_types(tuple[Any, ColumnTestResult])
        results, failures = current | "Compare" >> steps.with_outputs(FAILED, main="compared")
        if self._by is None:
            results = results | "Values" >> beam.Values().with_output_types(ColumnTestResult)
        return (results, failures) if self._returns_failures else results

    def _of_reference(self, pipeline: Any) -> Any:
        """Return the summary of each key of the reference; without keys, one for the key None."""
        reference = self._reference
        if isinstance(reference, dict):
            return pipeline | "Reference" >> beam.Create(list(reference.items()))
        if isinstance(reference, (str, os.PathLike)):
            named = None if self._columns is None else [*self._columns, *([self._by] if self._by else [])]
            reference = pipeline | "ReadReference" >> ReadFiles(os.fspath(reference), named)
        return self._summaries(reference, "Reference")

    def _summaries(self, rows: Any, name: str) -> Any:
        kind = tuple[Any, DescriptionState]
        if self._by is None:
            summary = combined(rows, f"Summarise{name}", SummariseFn(self._columns), DescriptionState)
            return summary | f"WithNoKey{name}" >> beam.Map(lambda state: (None, state)).with_output_types(kind)
        keyed = rows | f"By{name}" >> beam.FlatMap(rows_by_key, self._by, self._columns)
        return keyed | f"Summarise{name}" >> beam.CombinePerKey(SummariseFn(self._columns)).with_output_types(kind)

    def _in_memory(self, reference: Any) -> dict[Any, DescriptionState]:
        if self._by is None:
            return {None: state_of(reference, self._columns)}
        states: dict[Any, DescriptionState] = {}
        whole = reference if isinstance(reference, pa.Table) else pa.table(reference)
        for batch in whole.to_batches():
            for key, rows in rows_by_key(batch, self._by, self._columns):
                states.setdefault(key, DescriptionState(self._columns)).add(rows)
        return states


class _Compare(beam.DoFn):
    """Compares the summary of a key with that of the reference."""

    def __init__(self, level: float, failures: Failures) -> None:
        self._level = level
        self._failures = failures

    def process(  # type: ignore[override]
        self, element: tuple[Any, DescriptionState], references: Any, window: Any = beam.DoFn.WindowParam
    ) -> Iterator[Any]:
        key, current = element
        reference = next(iter(references[key]), None) or DescriptionState()
        reference.flush()
        current.flush()
        if min(reference.rows, current.rows) >= _FEWEST_ROWS:
            yield key, compare_columns(reference, current, self._level)
        elif self._failures.by is not None:
            yield key, untested_columns(reference.rows, current.rows, self._level)
        else:
            name, side = (
                ("the reference", reference) if reference.rows < _FEWEST_ROWS else ("the current sample", current)
            )
            error = DriftError(f"{name} has {side.rows} rows, expected at least {_FEWEST_ROWS}")
            yield TaggedOutput(FAILED, (key, self._failures.of(error, key, window)))


def rows_by_key(element: Any, by: str, columns: Sequence[str] | None) -> Iterator[tuple[Any, Any]]:
    """Yield the rows of each key, without the column of keys unless it is compared."""
    if not isinstance(element, pa.RecordBatch):
        row = row_as_dict(element)
        if by not in row:
            raise DriftError(f"found a row without {by!r}, expected the column of keys in every row")
        yield plain_value(row[by]), {name: value for name, value in row.items() if name != by or by in (columns or ())}
        return
    codes, values = codes_of(column_of(element, by), by)
    rest = element if by in (columns or ()) else element.drop_columns([by])
    order = np.argsort(codes, kind="stable")
    found, starts = np.unique(codes[order], return_index=True)
    for code, places in zip(found.tolist(), np.split(order, starts[1:]), strict=True):
        yield values[code], rest.take(pa.array(places))
