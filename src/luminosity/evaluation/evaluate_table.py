"""The transform ``Evaluate``, and the function ``evaluate`` for tables in memory."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.transforms.window import GlobalWindows

from luminosity.errors import EvaluationError
from luminosity.evaluation.columns import RowCollector, batch_of_rows, codes_of, column_of, roots_of
from luminosity.evaluation.conclude import conclude
from luminosity.evaluation.evaluation import Evaluation
from luminosity.evaluation.result import Task
from luminosity.evaluation.settings import ScoreOf, Settings, Slices, as_names, as_slices
from luminosity.evaluation.state import EvaluationState

__all__ = ["Evaluate", "StateFn", "batches_of", "check_table", "combined", "evaluate", "evaluate_batches"]

_QUERY_SHARDS = 64  # groups of queries that are ranked independently


class Evaluate(beam.PTransform[Any, Any]):
    """Evaluates predictions against labels: one ``Evaluation`` for the table, or for each window.

    >>> rows = [{"label": "cat", "prediction": "cat"}, {"label": "dog", "prediction": "cat"}]
    >>> with beam.Pipeline(runner="FnApiRunner") as pipeline:
    ...     found = pipeline | beam.Create(rows) | Evaluate("label", "prediction")
    ...     _ = found | beam.Map(lambda result: print(result["accuracy"], result.confusion.counts))
    0.5 [[1, 0], [1, 0]]

    Elements are record batches, or rows: dicts, Beam Rows, NamedTuples or dataclasses. The result is the same however
    rows are distributed over files, bundles and workers, also that of the bootstrap. Metrics are exact, and equal those
    of scikit-learn. A metric that is not defined, such as the AUC of a single class, has the value None and a reason.

    With windows there is one result for each window that has rows. Without windows, no rows at all give a result in
    which nothing is defined.

    Args:
        label: the column of true values. For rankings: how relevant a row is, 0 or more.
        prediction: the column of predictions. It may be left out if there is a score.
        score: for classes: the column of scores, for AUC, average precision and calibration. For rankings: the column
            that rows are ranked by, if it is not ``prediction``.
        prediction_b: the predictions of a second model, which is compared on the same rows.
        score_b: the scores of the second model.
        query: for rankings: the column that says which query a row belongs to.
        task: ``"classes"``, ``"numbers"``, ``"ranking"``, or ``"texts"`` to compare texts with expected texts. By
            default, ``query`` means a ranking; labels and predictions that are both numbers, and not both whole, mean
            numbers; everything else means classes.
        measures: for texts: columns of numbers of which the mean is a metric, too, such as the scores of a judge. Rows
            in which the number is null are left out of the mean, and counted in ``notes``.
        measures_b: the same measures of the second texts.
        preference: for two texts: a column that is above 0 where the second is better, 0 for a tie, and below 0 where
            the first is better, such as what a judge says who has seen both.
        positive: the class that ``score`` is the score of, and whose precision, recall and F1 are reported. Of two
            classes, the default is the last in order: 1, True, or the last text.
        score_of: ``"positive"`` if a score is that of the positive class; ``"prediction"`` if it is that of the
            predicted class, as classifiers of transformers return it. With more than two classes, the latter evaluates
            how well the score tells right predictions from wrong ones.
        slices: columns to evaluate separately for each of their values; a tuple of columns combines their values.
        k: for rankings: the numbers of first rows for recall@k and nDCG@k.
        bins: the number of bins of the calibration, of equal width.
        resamples: the replicates of the bootstrap; 0 for no intervals.
        confidence: the confidence of intervals.
        seed: the seed of the bootstrap.
        skip_missing: leave out rows with null, NaN or infinity; by default they are an error.
        most_distinct: how many distinct combinations of label, predictions and scores are kept for the table and for
            each slice, about 32 bytes each. If there are more, scores and numbers are rounded as little as needed, and
            ``notes`` of the result says so.
    """

    def __init__(
        self,
        label: str,
        prediction: str | None = None,
        *,
        score: str | None = None,
        prediction_b: str | None = None,
        score_b: str | None = None,
        query: str | None = None,
        task: Task | None = None,
        measures: Sequence[str] = (),
        measures_b: Sequence[str] = (),
        preference: str | None = None,
        positive: Any = None,
        score_of: ScoreOf = "positive",
        slices: Slices = (),
        k: Sequence[int] = (1, 5, 10),
        bins: int = 10,
        resamples: int = 500,
        confidence: float = 0.95,
        seed: int = 0,
        skip_missing: bool = False,
        most_distinct: int = 2_000_000,
    ) -> None:
        super().__init__()
        self._settings = Settings(
            label=label,
            prediction=prediction,
            score=score,
            prediction_b=prediction_b,
            score_b=score_b,
            query=query,
            task=task,
            measures=as_names("measures", measures),
            measures_b=as_names("measures_b", measures_b),
            preference=preference,
            positive=positive,
            score_of=score_of,
            slices=as_slices(slices),
            k=tuple(k),
            bins=bins,
            resamples=resamples,
            confidence=confidence,
            seed=seed,
            skip_missing=skip_missing,
            most_distinct=most_distinct,
        )

    def expand(self, input_or_inputs: Any) -> Any:
        """Combine the rows of each window; for rankings, first those of each query."""
        settings, collection = self._settings, input_or_inputs
        if settings.query is not None:
            collection = (
                collection
                | "Shard" >> beam.FlatMap(_by_query, settings).with_output_types(tuple[int, pa.RecordBatch])
                | "Group" >> beam.GroupByKey()
                | "Rank" >> beam.MapTuple(lambda _, batches: _ranked(batches, settings))
            )
        return combined(collection, "Evaluate", _EvaluateFn(settings), Evaluation)


def combined(collection: Any, label: str, combine_fn: beam.CombineFn, kind: type) -> Any:
    """Combine all elements, or those of each window."""
    combine = beam.CombineGlobally(combine_fn).with_output_types(kind)
    is_global = isinstance(collection.windowing.windowfn, GlobalWindows) and collection.is_bounded
    return collection | label >> (combine if is_global else combine.without_defaults())


class StateFn(beam.CombineFn):
    """Adds record batches, rows, or states of them to a state, which ``new`` makes."""

    def __init__(self, new: Callable[[], Any]) -> None:
        self._new = new

    def create_accumulator(self) -> Any:
        """Return an empty state."""
        return self._new()

    def add_input(self, mutable_accumulator: Any, element: Any) -> Any:
        """Add a batch or a row, or merge a state."""
        if isinstance(element, RowCollector):
            mutable_accumulator.merge(element)
        else:
            mutable_accumulator.add(element)
        return mutable_accumulator

    def merge_accumulators(self, accumulators: Iterable[Any]) -> Any:
        """Merge states in a new one."""
        merged = self._new()
        for each in accumulators:
            merged.merge(each)
        return merged

    def extract_output(self, accumulator: Any) -> Any:
        """Return the state itself."""
        return accumulator


class _EvaluateFn(StateFn):
    def __init__(self, settings: Settings) -> None:
        super().__init__(partial(EvaluationState, settings))

    def extract_output(self, accumulator: EvaluationState) -> Evaluation:
        return conclude(accumulator)


def _by_query(element: Any, settings: Settings) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the rows of a batch by the shard of their query."""
    batch = element if isinstance(element, pa.RecordBatch) else batch_of_rows([element], settings.columns)
    name = settings.query or ""
    codes, queries = codes_of(column_of(batch, name), name)
    shards = np.array([zlib.crc32(repr(query).encode()) % _QUERY_SHARDS for query in queries] or [0])[codes]
    batch = batch.select(roots_of(settings.columns, batch.schema.names))
    for shard in np.unique(shards).tolist():
        yield shard, batch.filter(pa.array(shards == shard))


def _ranked(batches: Iterable[pa.RecordBatch], settings: Settings) -> EvaluationState:
    state = EvaluationState(settings)
    for batch in batches:
        state.add(batch)
    state.finish_queries()
    return state


def evaluate(table: Any, label: str, prediction: str | None = None, **arguments: Any) -> Evaluation:
    """Return the evaluation of a table in memory; the arguments are those of ``Evaluate``.

    >>> found = evaluate(pa.table({"price": [1.0, 2.0, 4.0], "guess": [1.5, 2.0, 3.0]}), "price", "guess")
    >>> found["mae"], round(found["r2"], 3)
    (0.5, 0.732)

    ``table`` is a ``pyarrow.Table``, a record batch, an iterable of record batches or rows, or a dictionary of columns.
    """
    slices = as_slices(arguments.pop("slices", ()))
    k = tuple(arguments.pop("k", (1, 5, 10)))
    arguments |= {name: as_names(name, arguments[name]) for name in ("measures", "measures_b") if name in arguments}
    try:
        settings = Settings(label=label, prediction=prediction, slices=slices, k=k, **arguments)
    except TypeError as error:
        if not isinstance(error, EvaluationError):
            raise EvaluationError(f"found an argument that Evaluate does not have: {error}") from None
        raise
    return evaluate_batches(batches_of(table), settings)


def evaluate_batches(batches: Iterable[Any], settings: Settings) -> Evaluation:
    """Return the evaluation of record batches or rows, read one after the other."""
    state = EvaluationState(settings)
    for batch in batches:
        state.add(batch)
    return conclude(state)


def check_table(schema: pa.Schema, settings: Settings) -> None:
    """Raise if a table with these columns can't be evaluated, whatever it holds.

    >>> check_table(pa.schema({"price": pa.float64(), "guess": pa.float64()}), Settings("price", "gues"))
    Traceback (most recent call last):
    luminosity.errors.EvaluationError: found no column 'gues', expected one of price, guess; did you mean 'guess'?
    """
    state = EvaluationState(settings)
    state.add_batch(pa.RecordBatch.from_pylist([], schema=schema))  # it has to have the columns
    read = [schema.field(name) for name in roots_of(settings.columns, schema.names)]
    row = pa.RecordBatch.from_arrays([pa.nulls(1, each.type) for each in read], names=[each.name for each in read])
    state.add_batch(row)  # and their types have to fit, also if all values are missing


def batches_of(table: Any) -> Iterable[Any]:
    """Return the record batches of a table in memory."""
    if isinstance(table, pa.RecordBatch):
        return [table]
    if isinstance(table, dict):
        table = pa.table(table)
    if isinstance(table, pa.Table):
        return table.to_batches() or [pa.RecordBatch.from_pylist([], schema=table.schema)]
    return table
