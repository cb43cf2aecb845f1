"""The step of Enrich that sends rows to the model host, for several models at once, and makes the new columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.transforms.window import WindowedValue

from luminosity.errors import Fix, InvalidArgument, ModelFailed
from luminosity.inference.adapting.adapt import ModelSet
from luminosity.inference.blocks import Block, Indices, join, take
from luminosity.inference.enrich.column import Column, model_of
from luminosity.inference.enrich.prepare_columns import RowPreparer, blame_rows, reason
from luminosity.inference.enrich.table_steps import Letter, PreparedRows, TableBlock
from luminosity.inference.handlers.columns import plain, to_columns
from luminosity.inference.host.interface import Outcome
from luminosity.inference.steps.messages import StepSettings
from luminosity.inference.steps.routing import LaneRouter
from luminosity.inference.steps.sessions import Sessions, load_models, release_models

__all__ = ["InferColumnsDoFn", "NewColumn"]


class InferColumnsDoFn(beam.DoFn):
    """``process`` submits rows to all models and emits complete blocks; ``finish_bundle`` waits for the rest."""

    def __init__(self, columns: Mapping[str, Column], settings: Mapping[str, StepSettings]) -> None:
        self._columns = columns
        self._settings = settings

    def load_ahead(self) -> None:
        """Load the models before Beam calls ``setup``. The engine calls it as soon as a device's worker starts."""
        for name, column in self._columns.items():
            load_models(ModelSet(model_of(column.handler)), self._settings[name])

    def setup(self) -> None:
        """Find the host of each model and load the models that don't load late. Blocks until they are loaded."""
        next(iter(self._settings.values())).set_up_process()
        self._sessions = Sessions()
        self._models: dict[str, _Model] = {}
        try:
            for name, column in self._columns.items():
                self._models[name] = _Model(name, column, self._settings[name])
                self._models[name].lanes.set_up()
        except BaseException:
            self.teardown()  # Beam does not call it if setup fails
            raise
        for settings in self._settings.values():
            release_models(settings)

    def start_bundle(self) -> None:
        """Close the sessions that a failed bundle left open."""
        self._sessions.close()

    def process(
        self, block: TableBlock, timestamp: Any = beam.DoFn.TimestampParam, window: Any = beam.DoFn.WindowParam
    ) -> Iterator[WindowedValue]:
        """Submit the rows to all models and yield complete blocks. Blocks while a model's lane is full."""
        waiting = _Waiting(block, timestamp, window, list(self._models))
        for name, model in self._models.items():
            rows, waiting.failed[name] = model.rows(block)
            if len(rows.places):
                lane = model.lanes.only_lane()
                waiting.left += len(rows.places)
                self._sessions.submit(lane, rows.block, rows.costs, (waiting, name, rows.places), rows.weights)
                lane.counters.prepared(rows.seconds)
        if not waiting.left:
            yield self._emitted(waiting)
        for outcomes in self._sessions.ready():
            yield from self._emit(outcomes)

    def finish_bundle(self) -> Iterator[WindowedValue]:  # type: ignore[override]  # Beam's says None, and takes these.
        """Wait for all remaining predictions, yield their blocks, and update the metrics."""
        for outcomes in self._sessions.finish():
            yield from self._emit(outcomes)
        self._sessions.end([model.lanes for model in self._models.values()])

    def teardown(self) -> None:
        """Close the sessions and leave the lanes of all models."""
        self._sessions.close()
        for model in self._models.values():
            model.lanes.leave_all()

    def _emit(self, outcomes: list[Outcome]) -> Iterator[WindowedValue]:
        for outcome in outcomes:
            waiting: _Waiting = outcome.tag[0]
            waiting.take(outcome, self._settings[outcome.tag[1]].caught)
            if not waiting.left:
                yield self._emitted(waiting)

    def _emitted(self, waiting: _Waiting) -> WindowedValue:
        block, count = waiting.block, waiting.block.table.num_rows
        columns = {name: model.column.of(count, waiting.values[name]) for name, model in self._models.items()}
        failed: dict[int, Letter] = {}
        for letters in waiting.failed.values():
            failed = {**letters, **failed}  # keep the failure of the first model
        return WindowedValue(block.with_columns(columns, failed), waiting.timestamp, (waiting.window,))


class _Model:
    """One column's model in this step."""

    def __init__(self, name: str, column: Column, settings: StepSettings) -> None:
        self._name = name
        handler = model_of(column.handler)
        self.lanes = LaneRouter(ModelSet(handler), settings)
        self.column = NewColumn(name, handler.output_type if column.output is None else column.output)
        self._preparer = RowPreparer(column, {name: handler}, settings.caught)

    def rows(self, block: TableBlock) -> tuple[PreparedRows, dict[int, Letter]]:
        """Return the rows prepared by the step before; a model that takes columns unchanged prepares them here."""
        rows = block.prepared.get(self._name)
        if rows is None:
            prepared, letters = self._preparer.prepare(block)
            return prepared[self._name], letters
        return (_only_seen(rows, block.seen()) if block.failed else rows), {}


class _Waiting:
    """A block for which some models have not returned all predictions yet."""

    def __init__(self, block: TableBlock, timestamp: Any, window: Any, names: list[str]) -> None:
        self.block = block
        self.timestamp = timestamp
        self.window = window
        self.left = 0
        self.values: dict[str, list[tuple[Indices, Block]]] = {name: [] for name in names}
        self.failed: dict[str, dict[int, Letter]] = {name: {} for name in names}

    def take(self, outcome: Outcome, caught: tuple[type[BaseException], ...]) -> None:
        _, name, rows = outcome.tag
        places, error = rows[outcome.places], outcome.error
        self.left -= len(places)
        if error is None:
            self.values[name].append((places, outcome.values))
        elif isinstance(error, caught):
            self.failed[name] |= dict.fromkeys(places.tolist(), Letter(name, reason(error)))
        elif isinstance(error, Exception):
            if outcome.batch_count:
                blame_rows(error, self.block, int(places[0]), outcome.batch_count, name)
            raise error
        else:  # SystemExit and the like were meant for the model's thread, not for this one
            raise ModelFailed(f"the model's code raised {error!r}") from error


def _only_seen(rows: PreparedRows, seen: Any) -> PreparedRows:
    """Leave out rows that have failed since they were prepared."""
    left = np.flatnonzero(seen[rows.places])
    if len(left) == len(rows.places):
        return rows
    weights = None if rows.weights is None else rows.weights[left]
    return PreparedRows(rows.places[left], take(rows.block, left), rows.costs[left], weights, rows.seconds)


_NAME_THE_TYPE = Fix("name the type with Column(..., output=)")


class NewColumn:
    """Makes the batches of a new column, all of one type.

    The type is the requested one, or the handler's, or the type of the first values.

    >>> NewColumn("score", None).of(3, [(np.array([2, 0]), np.array([0.25, 0.5]))]).to_pylist()
    [0.5, None, 0.25]
    """

    def __init__(self, name: str, type: pa.DataType | None) -> None:
        self._name = name
        self._type = type
        self._is_inferred = type is None
        """Whether the type is inferred from the values so far."""

    def of(self, count: int, parts: Sequence[tuple[Indices, Block]]) -> pa.Array:
        """Return the column of a batch with ``count`` rows; a row that is in no part is null."""
        if not parts:
            return pa.nulls(count, self._type)
        values = self._arrow(join([block for _, block in parts]))
        places = np.concatenate([places for places, _ in parts])
        if len(places) == count and (places == np.arange(count)).all():
            return values
        order = np.full(count, -1)
        order[places] = np.arange(len(places))
        return values.take(pa.array(order, mask=order < 0))

    def _arrow(self, values: Block) -> pa.Array:
        wanted = self._type
        try:
            found = _arrow(values, wanted)
            if wanted is None or found.type == wanted:
                if not pa.types.is_null(found.type):
                    self._type = found.type
                return found
            if not self._is_inferred or pa.types.is_null(found.type):
                return _cast(found, values, wanted)
        except (pa.ArrowException, ValueError) as error:
            raise InvalidArgument(
                f"the predictions for the column {self._name!r} can't become {wanted or 'Arrow'}: {error}",
                fix=_NAME_THE_TYPE,
            ) from error
        raise InvalidArgument(
            f"the column {self._name!r} was {wanted} in one batch and is {found.type} in another", fix=_NAME_THE_TYPE
        )


def _arrow(values: Block, wanted: pa.DataType | None) -> pa.Array:
    """Return values as an Arrow array. Arrays are converted at once; only Python objects are converted one by one."""
    if isinstance(values, pa.Array):
        return values
    if isinstance(values, pa.RecordBatch):
        return values.to_struct_array()
    if isinstance(values, np.ndarray):
        return _of_numpy(values)
    if _are_arrays(values) and len({(value.shape, value.dtype) for value in values}) == 1:
        return _of_numpy(np.stack(values))
    return _of_python(values, wanted)


def _of_python(values: Sequence[Any], wanted: pa.DataType | None) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        values = plain(list(values))
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        if wanted is None:
            raise
        return pa.array(values, wanted)  # Arrow can't infer the type of tuples, for example


def _of_numpy(values: Any) -> pa.Array:
    if values.dtype.kind in "biuf" and values.dtype.itemsize <= 8:
        return to_columns(values)
    if values.dtype.kind == "V":  # bfloat16, which Arrow does not have
        return to_columns(values.astype(np.float32))
    return pa.array(values) if values.dtype.kind in "mM" and values.ndim == 1 else pa.array(values.tolist())


def _are_arrays(values: Sequence[Any]) -> bool:
    return all(isinstance(value, np.ndarray | np.generic) for value in values)


def _cast(found: pa.Array, values: Block, wanted: pa.DataType) -> pa.Array:
    """Convert without loss.

    ``pa.array(values, wanted)`` would turn 2.5 into 2, so it is used only if Arrow has no cast.
    """
    try:
        return found.cast(wanted)
    except (pa.ArrowNotImplementedError, pa.ArrowTypeError):
        if not isinstance(values, list):
            raise
        return pa.array(values, wanted)
