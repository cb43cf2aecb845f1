"""The transform ``Describe``, and the function ``describe`` for tables in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.pvalue import AsSingleton
from apache_beam.transforms.window import GlobalWindows

from luminosity.errors import EvaluationError
from luminosity.evaluation.columns import RowCollector, column_of
from luminosity.evaluation.description.changes import column_change
from luminosity.evaluation.description.column_summary import ColumnSummary
from luminosity.evaluation.description.result import ColumnDescription, Description, Histogram
from luminosity.evaluation.evaluate_table import StateFn, batches_of, combined

__all__ = [
    "Describe",
    "DescriptionState",
    "SummariseFn",
    "describe",
    "describe_states",
    "state_of",
]

_QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
_BARS = 40  # of a histogram
_TOP = 10  # most frequent values of a column
_WHOLE = 2.0**53  # whole numbers up to here are distinct as floating-point numbers
_TAIL = 10.0  # a histogram ends at the outer percentiles if its ends lie more than this many of their distances apart


class DescriptionState(RowCollector):
    """Collects the columns of record batches or rows. States can be merged in any order."""

    def __init__(self, columns: Sequence[str] | None = None) -> None:
        super().__init__(columns)
        self.rows = 0
        self.summaries: dict[str, ColumnSummary] = {}

    def merge(self, other: DescriptionState) -> None:
        """Add what another state has collected."""
        self.flush()
        other.flush()
        self.rows += other.rows
        for name, summary in other.summaries.items():
            self.summaries.setdefault(name, ColumnSummary()).merge(name, summary)

    def description(self) -> Description:
        """Return the description of everything that was added."""
        self.flush()
        columns = {name: _described(name, summary, self.rows) for name, summary in self.summaries.items()}
        return Description(self.rows, columns)

    def add_batch(self, batch: pa.RecordBatch) -> None:
        """Add the rows of a batch."""
        self.rows += batch.num_rows
        for name in batch.schema.names if self._columns is None else self._columns:
            self.summaries.setdefault(name, ColumnSummary()).add(name, column_of(batch, name))


def _described(name: str, summary: ColumnSummary, rows: int) -> ColumnDescription:
    numbers = summary.numbers
    found = ColumnDescription(
        name,
        summary.kind or "nulls",
        sorted(summary.types),
        summary.count,
        rows - summary.count - summary.nan,
        summary.nan,
        summary.infinite,
    )
    if summary.kind in ("numbers", "texts", "booleans", "times", "bytes"):
        found = replace(found, distinct=summary.distinct.estimate, distinct_is_exact=summary.distinct.is_exact)
    if summary.kind == "numbers" and numbers.values.is_exact and max(abs(numbers.low), abs(numbers.high)) < _WHOLE:
        found = replace(found, distinct=len(numbers.values.counts), distinct_is_exact=True)
    if summary.kind in ("texts", "booleans"):
        found = replace(found, top=summary.top.top(_TOP), top_error=summary.top.error)
    if summary.kind == "numbers" and numbers.count and numbers.values.is_exact:
        found = replace(found, top=_frequent(numbers))
    if numbers.count:
        quantiles = {share: numbers.quantile(share) for share in _QUANTILES}
        histogram = Histogram(edges := _edges(numbers), numbers.histogram(np.array(edges)))
        found = replace(found, mean=numbers.mean, deviation=numbers.deviation, quantiles=quantiles, histogram=histogram)
    if summary.widths.count:
        found = replace(found, width=(int(summary.widths.low), int(summary.widths.high)))
    return found


def _frequent(numbers: Any) -> list[tuple[float, int]]:
    """Return the most frequent numbers, if some occur several times."""
    values, counts = numbers.values.values[:, 0], numbers.values.counts
    order = np.lexsort((values, -counts))[:_TOP]
    if counts[order[0]] < 2:
        return []
    return [(float(values[at]), int(counts[at])) for at in order]


def _edges(numbers: Any, other: Any = None) -> list[float]:
    """Return edges of equal width. Far ends are cut off: the outer bins then have what lies beyond."""
    sides = [numbers] if other is None else [numbers, other]
    ends: list[tuple[float, float]] = []
    for side in sides:
        inner = side.quantile(0.01), side.quantile(0.99)
        is_far = side.high - side.low > _TAIL * (inner[1] - inner[0]) > 0
        ends.append(inner if is_far else (side.low, side.high))
    low, high = min(each[0] for each in ends), max(each[1] for each in ends)
    if low == high:
        low, high = low - 0.5, high + 0.5
    shares = np.linspace(0, 1, _BARS + 1)
    return (low * (1 - shares) + high * shares).tolist()


def describe_states(current: DescriptionState, reference: DescriptionState) -> Description:
    """Return the description of the current table, and how it differs from the reference."""
    found, before = current.description(), reference.description()
    names = [*current.summaries, *(name for name in reference.summaries if name not in current.summaries)]
    rows = reference.rows, current.rows
    changes = [column_change(n, reference.summaries.get(n), current.summaries.get(n), rows) for n in names]
    columns, histograms = dict(found.columns), dict[str, Histogram]()
    for name, column in found.columns.items():
        other, own = reference.summaries.get(name), current.summaries[name]
        if other is not None and other.kind == own.kind and other.numbers.count and own.numbers.count:
            edges = _edges(own.numbers, other.numbers)
            columns[name] = replace(column, histogram=Histogram(edges, own.numbers.histogram(np.array(edges))))
            histograms[name] = Histogram(edges, other.numbers.histogram(np.array(edges)))
    changes.sort(key=lambda change: (-change.distance, change.name))
    return replace(found, columns=columns, changes=changes, reference=before, reference_histograms=histograms)


def describe(table: Any, reference: Any = None, columns: Sequence[str] | None = None) -> Description:
    """Return the description of a table in memory, and with ``reference`` how it differs from it.

    >>> found = describe({"age": [20, 30, 40, None], "name": ["Ada", "Bo", "Ada", "Cy"]})
    >>> found["age"].mean, found["age"].nulls, found["name"].top[0]
    (30.0, 1, ('Ada', 2))

    Tables are ``pyarrow.Table``, record batches, iterables of record batches or rows, or dictionaries of columns.
    """
    current = state_of(table, columns)
    return current.description() if reference is None else describe_states(current, state_of(reference, columns))


def state_of(table: Any, columns: Sequence[str] | None = None) -> DescriptionState:
    """Return the summaries of a table in memory, as ``describe`` takes it."""
    state = DescriptionState(columns)
    for batch in batches_of(table):
        state.add(batch)
    state.flush()
    return state


class Describe(beam.PTransform[Any, Any]):
    """Describes the columns of a table in one pass: one ``Description`` for the table, or for each window.

    >>> with beam.Pipeline(runner="FnApiRunner") as pipeline:
    ...     rows = pipeline | beam.Create([{"age": 20}, {"age": 30}, {"age": None}])
    ...     _ = rows | Describe() | beam.Map(lambda found: print(found, found["age"].mean, found["age"].nulls))
    3 rows, 1 columns 25.0 1

    Elements are record batches, or rows: dicts, Beam Rows, NamedTuples or dataclasses. Every column has its count,
    missing values, number of distinct values, mean, deviation, quantiles, histogram and most frequent values; texts
    have the distribution of their lengths, vectors that of their norms. Memory is bounded, some megabytes a column. Up
    to 32,768 distinct numbers, quantiles are exact; with more, values have a relative error below 1%, mostly far less.

    With a reference, ``changes`` of the result says how each column differs from it, the largest change first:

    >>> with beam.Pipeline(runner="FnApiRunner") as pipeline:
    ...     rows = pipeline | beam.Create([{"age": 20}, {"age": 30}])
    ...     found = rows | Describe(reference={"age": [30, 40]})
    ...     _ = found | beam.Map(lambda found: print(found.changes[0].distance, found.changes[0].said))
    0.5 median 35, now 25

    Args:
        columns: the columns to describe; by default all.
        reference: a table to compare with: a PCollection with elements of the same forms, or a table in memory as
            ``describe`` takes it, which is summarised once, when the pipeline is built. In a stream, every window is
            compared with the same reference, unless the reference has windows itself.
    """

    def __init__(self, columns: Sequence[str] | None = None, reference: Any = None) -> None:
        super().__init__()
        if isinstance(columns, str):
            raise EvaluationError(f"found columns={columns!r}, expected a list", fix=f"pass columns=[{columns!r}]")
        self._columns = None if columns is None else tuple(columns)
        is_stream = isinstance(reference, beam.PCollection)
        self._reference = reference if reference is None or is_stream else state_of(reference, self._columns)

    def expand(self, input_or_inputs: Any) -> Any:
        """Combine the rows of each window, and compare them with the reference."""
        if self._reference is None:
            return combined(input_or_inputs, "Describe", _DescribeFn(self._columns), Description)
        reference = self._reference
        if isinstance(reference, beam.PCollection):
            if not reference.is_bounded and isinstance(reference.windowing.windowfn, GlobalWindows):
                raise EvaluationError(
                    "found a reference that never ends, expected a bounded one or windows",
                    fix="apply beam.WindowInto() to the reference",
                )
            states = combined(reference, "SummariseReference", SummariseFn(self._columns), DescriptionState)
            # A window of the reference without rows is an empty table.
            reference = AsSingleton(states, default_value=DescriptionState(self._columns))
        current = combined(input_or_inputs, "Summarise", SummariseFn(self._columns), DescriptionState)
        return current | "Compare" >> beam.Map(describe_states, reference).with_output_types(Description)


class SummariseFn(StateFn):
    """Summarises the columns of record batches or rows, in bounded memory."""

    def __init__(self, columns: Sequence[str] | None) -> None:
        super().__init__(partial(DescriptionState, columns))


class _DescribeFn(SummariseFn):
    def extract_output(self, accumulator: DescriptionState) -> Any:  # type: ignore[override]
        return accumulator.description()
