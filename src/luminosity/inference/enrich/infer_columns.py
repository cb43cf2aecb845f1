"""The step of Enrich that sends rows to the model host, for several models at once, and makes the new columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.transforms.window import WindowedValue

from luminosity.errors import Fix, InvalidArgument, ModelFailed
from luminosity.inference.blocks import Block, Indices, join, take
from luminosity.inference.blocks import rows as values_of
from luminosity.inference.enrich.column import Column
from luminosity.inference.enrich.column_models import ColumnModels
from luminosity.inference.enrich.prepare_columns import RowPreparer, blame_rows, reason
from luminosity.inference.enrich.repeats import First, Repeats
from luminosity.inference.enrich.table_steps import Letter, PreparedRows, TableBlock
from luminosity.inference.handlers.columns import plain, to_columns
from luminosity.inference.host.interface import Outcome
from luminosity.inference.steps.carried import as_list
from luminosity.inference.steps.messages import PreparedBlock, StepSettings
from luminosity.inference.steps.routing import EnteredLane, LaneRouter
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
            load_models(ColumnModels(name, column).set, self._settings[name])

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
        for model in self._models.values():
            if model.repeats is not None:
                model.repeats.forget_unfinished()

    def process(
        self, block: TableBlock, timestamp: Any = beam.DoFn.TimestampParam, window: Any = beam.DoFn.WindowParam
    ) -> Iterator[WindowedValue]:
        """Submit the rows to all models and yield complete blocks. Blocks while a model's lane is full."""
        waiting = _Waiting(block, timestamp, window, list(self._models))
        for name, model in self._models.items():
            prepared, waiting.failed[name] = model.rows(block)
            for rows in prepared:
                for lane, mine in model.lanes_of(rows):
                    self._submit(waiting, model, lane, mine)
        if not waiting.left:
            yield self._emitted(waiting)
        for outcomes in self._sessions.ready():
            yield from self._emit(outcomes)

    def finish_bundle(self) -> Iterator[WindowedValue]:  # type: ignore[override]  # Beam's says None, and takes these.
        """Wait for all remaining predictions, yield their blocks, and update the metrics."""
        for outcomes in self._sessions.finish():
            yield from self._emit(outcomes)
            for model in self._models.values():
                model.lanes.look_for_updates()
        self._sessions.end([model.lanes for model in self._models.values()])

    def teardown(self) -> None:
        """Close the sessions and leave the lanes of all models."""
        self._sessions.close()
        for model in self._models.values():
            model.lanes.leave_all()

    def _submit(self, waiting: _Waiting, model: _Model, lane: EnteredLane, rows: PreparedRows) -> None:
        """Submit rows to a lane, but give those that equal an earlier one its prediction."""
        waiting.left += len(rows.places)
        firsts: Sequence[First] = ()
        if model.repeats is not None:
            rows, firsts, done = model.repeats.split(waiting.block.table, rows, lane, waiting)
            for first, places in _by_first(done):
                model.give(first, waiting, places)
        if len(rows.places):
            self._sessions.submit(lane, rows.block, rows.costs, _Submitted(waiting, model, rows, firsts), rows.weights)
        lane.counters.prepared(rows.seconds)

    def _emit(self, outcomes: list[Outcome]) -> Iterator[WindowedValue]:
        for outcome in outcomes:
            submitted: _Submitted = outcome.tag
            for waiting in submitted.take(outcome):
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
    """One column's models in this step."""

    def __init__(self, name: str, column: Column, settings: StepSettings) -> None:
        self.name = name
        self.caught = settings.caught
        models = ColumnModels(name, column)
        self.lanes = LaneRouter(models.set, settings)
        self.column = NewColumn(name, models.output_type)
        self.functions = models.functions
        self.repeats = Repeats(column) if models.computes_once else None
        self._is_keyed = models.set.is_keyed
        self._preparer = RowPreparer(column, {name: models}, settings.caught)

    def rows(self, block: TableBlock) -> tuple[Sequence[PreparedRows], dict[int, Letter]]:
        """Return the rows prepared by the step before; a model that takes columns unchanged prepares them here."""
        prepared = block.prepared.get(self.name)
        if prepared is None:
            made, letters = self._preparer.prepare(block)
            return made[self.name], letters
        return ([_only_seen(rows, block.seen()) for rows in prepared] if block.failed else prepared), {}

    def lanes_of(self, rows: PreparedRows) -> Iterator[tuple[EnteredLane, PreparedRows]]:
        """Yield the lanes for these rows: one, or one for each version that their keys use."""
        if not self._is_keyed:
            yield self.lanes.only_lane(), rows
            return
        numbered: list[Any] = [(key, number) for number, key in enumerate(rows.keys)]
        block = PreparedBlock(numbered, [None] * len(numbered), None, rows.costs, model=rows.model)
        for lane, part in self.lanes.route(block, None):
            numbers = [number for _, number in as_list(part.examples)]
            yield lane, rows if len(numbers) == len(numbered) else rows.part(np.array(numbers))

    def give(self, first: First, waiting: _Waiting, places: Sequence[int]) -> None:
        """Give rows of a block the prediction of an equal row."""
        first.lane.counters.repeated(len(places))
        values = take(first.values, np.full(len(places), first.place))
        waiting.add(self, np.array(places), values, [first.example] * len(places), first.model_id)


class _Waiting:
    """A block for which some models have not returned all predictions yet."""

    def __init__(self, block: TableBlock, timestamp: Any, window: Any, names: list[str]) -> None:
        self.block = block
        self.timestamp = timestamp
        self.window = window
        self.left = 0
        self.values: dict[str, list[tuple[Indices, Block]]] = {name: [] for name in names}
        self.failed: dict[str, dict[int, Letter]] = {name: {} for name in names}

    def add(self, model: _Model, places: Indices, values: Block, examples: Sequence[Any], model_id: str | None) -> None:
        """Add the predictions of some rows, after the functions that follow the model."""
        self.left -= len(places)
        if not model.functions.after:
            self.values[model.name].append((places, values))
            return
        made: list[Any] = []
        good: list[int] = []
        for place, example, value in zip(places.tolist(), examples, values_of(values), strict=True):
            try:
                made.append(model.functions.prediction(example, value, model_id))
                good.append(place)
            except model.caught as error:
                self.failed[model.name][place] = Letter(model.name, reason(error))
            except Exception as error:
                blame_rows(error, self.block, place, 1, model.name)
                raise
        if good:
            self.values[model.name].append((np.array(good), made))

    def fail(self, model: _Model, places: Indices, error: BaseException, batch_count: int) -> None:
        """Add dead letters for some rows, or raise the error if it is not caught."""
        self.left -= len(places)
        if isinstance(error, model.caught):
            self.failed[model.name] |= dict.fromkeys(places.tolist(), Letter(model.name, reason(error)))
        elif isinstance(error, Exception):
            if batch_count:
                blame_rows(error, self.block, int(places[0]), batch_count, model.name)
            raise error
        else:  # SystemExit and the like were meant for the model's thread, not for this one
            raise ModelFailed(f"the model's code raised {error!r}") from error


class _Submitted(NamedTuple):
    """Rows of a block that were submitted to a lane, and their entries if equal rows may follow them."""

    waiting: _Waiting
    model: _Model
    rows: PreparedRows
    firsts: Sequence[First]

    def take(self, outcome: Outcome) -> Sequence[_Waiting]:
        """Pass the predictions of some rows, or their failure, to all blocks that wait for them; return these."""
        waiting, model, rows, _ = self
        if outcome.error is not None:
            waiting.fail(model, rows.places[outcome.places], outcome.error, outcome.batch_count)
        else:
            examples = take(list(rows.examples), outcome.places) if rows.examples else ()
            waiting.add(model, rows.places[outcome.places], outcome.values, examples, outcome.model_id)
        return [waiting] if not self.firsts else self._pass_on(outcome)

    def _pass_on(self, outcome: Outcome) -> Sequence[_Waiting]:
        touched = {id(self.waiting): self.waiting}
        firsts = [self.firsts[place] for place in outcome.places.tolist()]
        for place, first in enumerate(firsts):
            first.values, first.place, first.model_id = outcome.values, place, outcome.model_id
            followers, first.followers = first.followers, []
            for block, places in _by_block(followers):
                touched[id(block)] = block
                if outcome.error is None:
                    self.model.give(first, block, places)
                else:
                    block.fail(self.model, np.array(places), outcome.error, outcome.batch_count)
        if outcome.error is not None and self.model.repeats is not None:
            self.model.repeats.drop(firsts)
        return list(touched.values())


def _by_first(rows: Sequence[tuple[First, int]]) -> Iterator[tuple[First, list[int]]]:
    places: dict[First, list[int]] = {}
    for first, place in rows:
        places.setdefault(first, []).append(place)
    yield from places.items()


def _by_block(followers: Sequence[tuple[_Waiting, int]]) -> Iterator[tuple[_Waiting, list[int]]]:
    places: dict[_Waiting, list[int]] = {}
    for block, place in followers:
        places.setdefault(block, []).append(place)
    yield from places.items()


def _only_seen(rows: PreparedRows, seen: Any) -> PreparedRows:
    """Leave out rows that have failed since they were prepared."""
    left = np.flatnonzero(seen[rows.places])
    return rows if len(left) == len(rows.places) else rows.part(left)


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
