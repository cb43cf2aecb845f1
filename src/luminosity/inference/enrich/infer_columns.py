"""The step of Enrich that sends rows to the model host, for several models at once, and appends the new columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.transforms.window import WindowedValue

from luminosity.errors import ModelFailed
from luminosity.inference.adapting.model_set import ModelSet
from luminosity.inference.blocks import Block, Indices, take
from luminosity.inference.enrich.column import Column, model_of
from luminosity.inference.enrich.outputs import NewColumn
from luminosity.inference.enrich.prepare_columns import RowPreparer, blame_rows, reason
from luminosity.inference.enrich.table_block import Letter, PreparedRows, TableBlock
from luminosity.inference.host.work import Outcome
from luminosity.inference.steps.loaded_ahead import load_models, release_models
from luminosity.inference.steps.routing import LaneRouter
from luminosity.inference.steps.sessions import Sessions
from luminosity.inference.steps.settings import StepSettings

__all__ = ["InferColumnsDoFn"]


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
