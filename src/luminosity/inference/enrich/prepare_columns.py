"""Prepares rows for models, once for all models that prepare them in the same way."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.metrics import Metrics

from luminosity.core import ELEMENT_AT_FAULT, REMEDY
from luminosity.errors import Fix, TableError
from luminosity.inference.blocks import Block, Indices
from luminosity.inference.enrich.column import Column, block_of, decoded, examples_of, model_of
from luminosity.inference.enrich.table_steps import Letter, PreparedRows, TableBlock
from luminosity.inference.handler import Handler
from luminosity.inference.preparing import Attempt, Preparer
from luminosity.inference.steps.messages import StepSettings

__all__ = ["PrepareColumnsDoFn", "RowPreparer", "alike", "blame_rows", "reason"]


ROWS_PREPARED = "rows_prepared"
"""The name of a counter; its namespace is the names of the columns that share the prepared rows."""

Caught = tuple[type[BaseException], ...]

_FIND_ROW = Fix(
    "find the row with Enrich(...).with_exception_handling()", command="add --dead-letters PATH to find the row"
)


class PrepareColumnsDoFn(beam.DoFn):
    """Prepares rows on CPU workers."""

    def __init__(self, columns: Mapping[str, Column], settings: StepSettings) -> None:
        self._columns = columns
        self._settings = settings

    def setup(self) -> None:
        """Set up the process, and make one preparer for all columns whose models prepare alike."""
        self._settings.set_up_process()
        models = {name: model_of(column.handler) for name, column in self._columns.items()}
        for model in models.values():
            model.set_environment_vars()
        self._preparers = [
            RowPreparer(self._columns[names[0]], {name: models[name] for name in names}, self._settings.caught)
            for names in alike(self._columns, models)
        ]

    def process(self, block: TableBlock) -> Iterator[TableBlock]:
        """Yield the block with the prepared examples of all columns and with the rows that failed."""
        prepared, failed = dict(block.prepared), dict(block.failed)
        for preparer in self._preparers:
            found, letters = preparer.prepare(block)
            prepared |= found
            failed = {**letters, **failed}  # keep the first failure
            rows = len(found[preparer.names[0]].places) + len(letters)
            Metrics.counter("+".join(preparer.names), ROWS_PREPARED).inc(rows)
        yield replace(block, prepared=prepared, failed=failed)


def alike(columns: Mapping[str, Column], models: Mapping[str, Handler[Any, Any, Any]]) -> list[list[str]]:
    """Group columns whose models prepare the same inputs in the same way."""
    groups: dict[Hashable, list[str]] = {}
    for name, model in models.items():
        key = model.prepare_key()
        inputs: Any = columns[name].inputs
        inputs = inputs if isinstance(inputs, str) else tuple(inputs.items() if isinstance(inputs, Mapping) else inputs)
        # A class that overrides `prepare` may have inherited its key, so `prepare` must be the same, too.
        whose: Hashable = name if key is None else (type(model).prepare, key, inputs)
        groups.setdefault(whose, []).append(name)
    return list(groups.values())


def reason(error: BaseException) -> str:
    """Return the text of a failure for a dead letter."""
    return f"{type(error).__name__}: {error}"


class RowPreparer:
    """Prepares rows for all models that prepare the same inputs in the same way; the first model does the work."""

    def __init__(self, column: Column, models: Mapping[str, Handler[Any, Any, Any]], caught: Caught) -> None:
        self.names = list(models)
        self._column = column
        self._caught = caught
        self._takes_columns = models[self.names[0]].columnar
        self._takes_nulls = models[self.names[0]].takes_nulls
        self._preparers = {name: Preparer(model) for name, model in models.items()}

    def prepare(self, block: TableBlock) -> tuple[dict[str, PreparedRows], dict[int, Letter]]:
        """Return the examples of each model, and the dead letters of rows that can't be prepared."""
        begun = time.perf_counter()
        places, letters = self._with_inputs(block)
        if not len(places):
            return {name: PreparedRows(places, [], np.empty(0), None) for name in self.names}, letters
        attempt = self._attempt(block, places)
        letters |= {int(places[place]): self._letter(error) for place, error in attempt.failed}
        places = places[attempt.places]
        done = attempt.prepared
        found: dict[str, PreparedRows] = {}
        for name, preparer in self._preparers.items():
            if done is None:
                found[name] = PreparedRows(places, [], np.empty(0), None)
                continue
            weighed = preparer.weighed(done.block, done.examples) if found else done
            # Counted only once, for the first model.
            seconds = 0.0 if found else time.perf_counter() - begun
            found[name] = PreparedRows(places, weighed.block, weighed.costs, weighed.weights, seconds)
        return found, letters

    def _with_inputs(self, block: TableBlock) -> tuple[Indices, dict[int, Letter]]:
        """Return the rows that have all inputs, and dead letters for those in which one is null."""
        seen = block.seen()
        letters: dict[int, Letter] = {}
        for name in () if self._takes_nulls else self._column.names:
            column = decoded(block.table.column(name))  # a dictionary may hold a null, too
            if not column.null_count:
                continue
            lacking = np.flatnonzero(seen & column.is_null().to_numpy(zero_copy_only=False))
            if len(lacking):
                letters |= dict.fromkeys(lacking.tolist(), self._letter(self._null_input(name, block, int(lacking[0]))))
                seen[lacking] = False
        return np.flatnonzero(seen), letters

    def _null_input(self, name: str, block: TableBlock, place: int) -> ValueError:
        """Return the error for a dead letter; raise it if errors of its type are not caught."""
        caught = ValueError(f"{name!r} is null")
        if isinstance(caught, self._caught):
            return caught
        error = TableError(
            f"the column {self.names[0]!r} takes {name!r}, which is null in {block.row(place)}",
            fix=Fix(
                "filter these rows out first, or get them as dead letters with Enrich(...).with_exception_handling()",
                command="filter these rows out first, or add --dead-letters PATH",
            ),
        )
        setattr(error, ELEMENT_AT_FAULT, block.row(place))
        raise error

    def _attempt(self, block: TableBlock, places: Indices) -> Attempt:
        table = block.table.select(list(dict.fromkeys(self._column.names)))
        inputs: Block = block_of(table if len(places) == table.num_rows else table.take(places), self._column)
        try:
            return self._preparers[self.names[0]].attempt(
                inputs if self._takes_columns else examples_of(inputs), self._caught
            )
        except Exception as error:
            blame_rows(error, block, int(places[0]), len(places), self.names[0])
            raise

    def _letter(self, error: BaseException) -> Letter:
        return Letter(self.names[0], reason(error))


def blame_rows(error: BaseException, block: TableBlock, place: int, count: int, name: str) -> None:
    """Mark ``error`` with the rows that failed together, of which ``place`` is the first, and how to find the one."""
    row = f"{block.row(place)}, for the column {name!r}"
    setattr(error, ELEMENT_AT_FAULT, row if count == 1 else f"one of {count} rows, the first is {row}")
    if count > 1:
        setattr(error, REMEDY, _FIND_ROW)
