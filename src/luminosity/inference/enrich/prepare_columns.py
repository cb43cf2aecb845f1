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
from luminosity.inference.adapting.adapt import THE_MODEL
from luminosity.inference.blocks import Block, Indices, rows
from luminosity.inference.enrich.column import Column, block_of, decoded, examples_of
from luminosity.inference.enrich.column_models import ColumnModels
from luminosity.inference.enrich.table_steps import Letter, PreparedRows, TableBlock
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
        models = {name: ColumnModels(name, column) for name, column in self._columns.items()}
        for handler in (handler for each in models.values() for handler in each.handlers):
            handler.set_environment_vars()
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
            count = sum(len(each.places) for each in found[preparer.names[0]]) + len(letters)
            Metrics.counter("+".join(preparer.names), ROWS_PREPARED).inc(count)
        yield replace(block, prepared=prepared, failed=failed)


def alike(columns: Mapping[str, Column], models: Mapping[str, ColumnModels]) -> list[list[str]]:
    """Group columns whose models prepare the same inputs in the same way."""
    groups: dict[Hashable, list[str]] = {}
    for name, each in models.items():
        model = each.first
        is_alone = each.set.is_keyed or each.functions.before or each.functions.after
        key = None if is_alone else model.prepare_key()
        inputs: Any = columns[name].inputs
        inputs = inputs if isinstance(inputs, str) else tuple(inputs.items() if isinstance(inputs, Mapping) else inputs)
        # A class that overrides `prepare` may have inherited its key, so `prepare` must be the same, too.
        whose: Hashable = name if key is None else (type(model).prepare, key, inputs, columns[name].nulls)
        groups.setdefault(whose, []).append(name)
    return list(groups.values())


def reason(error: BaseException) -> str:
    """Return the text of a failure for a dead letter."""
    return f"{type(error).__name__}: {error}"


class RowPreparer:
    """Prepares rows for all models that prepare the same inputs in the same way; the first model does the work.

    If each key has its own model, it prepares for those of one column.
    """

    def __init__(self, column: Column, models: Mapping[str, ColumnModels], caught: Caught) -> None:
        self.names = list(models)
        self._column = column
        self._caught = caught
        self._first = models[self.names[0]]
        self._takes_nulls = self._first.first.takes_nulls
        self._preparers = {
            (name, model): Preparer(handler)
            for name, each in models.items()
            for model, handler in each.set.handlers.items()
        }

    def prepare(self, block: TableBlock) -> tuple[dict[str, list[PreparedRows]], dict[int, Letter]]:
        """Return the examples of each model, and the dead letters of rows that can't be prepared."""
        places, letters = self._with_inputs(block)
        found: dict[str, list[PreparedRows]] = {name: [] for name in self.names}
        for model, mine, keys in self._by_model(block, places, letters):
            if len(mine):
                self._prepare(block, model, mine, keys, found, letters)
        return found, letters

    def _by_model(
        self, block: TableBlock, places: Indices, letters: dict[int, Letter]
    ) -> Iterator[tuple[Hashable, Indices, list[Any]]]:
        """Yield the rows of each model, with their keys; rows whose key has no model become letters."""
        if self._column.key is None:
            yield THE_MODEL, places, []
            return
        by_model: dict[Hashable, tuple[list[int], list[Any]]] = {}
        keys = block.table.column(self._column.key).to_pylist()
        for place in places.tolist():
            try:
                model = self._first.set.name_of_key(keys[place])
            except KeyError as error:
                if not isinstance(error, self._caught):
                    raise self._unknown_key(error, block, place) from None
                letters[place] = self._letter(error)
                continue
            mine = by_model.setdefault(model, ([], []))
            mine[0].append(place)
            mine[1].append(keys[place])
        for model, (mine, their_keys) in by_model.items():
            yield model, np.array(mine), their_keys

    def _prepare(
        self,
        block: TableBlock,
        model: Hashable,
        places: Indices,
        keys: list[Any],
        found: dict[str, list[PreparedRows]],
        letters: dict[int, Letter],
    ) -> None:
        begun = time.perf_counter()
        inputs, good = self._inputs(block, places, keys, letters)
        if not len(good):
            return
        places, keys = places[good], [keys[place] for place in good] if keys else keys
        attempt = self._attempt(block, places, inputs, model)
        letters |= {int(places[place]): self._letter(error) for place, error in attempt.failed}
        done = attempt.prepared
        if done is None:
            return
        places, keys = places[attempt.places], [keys[place] for place in attempt.places] if keys else keys
        for number, name in enumerate(self.names):
            weighed = self._preparers[name, model].weighed(done.block, done.examples) if number else done
            # Counted only once, for the first model.
            seconds = 0.0 if number else time.perf_counter() - begun
            examples = rows(done.examples) if self._first.functions.after else ()
            found[name].append(
                PreparedRows(places, weighed.block, weighed.costs, weighed.weights, seconds, model, keys, examples)
            )

    def _inputs(
        self, block: TableBlock, places: Indices, keys: list[Any], letters: dict[int, Letter]
    ) -> tuple[Block, Indices]:
        """Return the examples of the model, and which of the rows have one, after the functions before the model."""
        table = block.table.select(list(dict.fromkeys(self._column.names)))
        inputs: Block = block_of(table if len(places) == table.num_rows else table.take(places), self._column)
        everything = np.arange(len(places))
        if self._first.takes_columns:
            return inputs, everything
        examples = examples_of(inputs)
        if keys:
            examples = list(zip(keys, examples, strict=True))
        if not self._first.functions.before:
            return examples, everything
        made: list[Any] = []
        good: list[int] = []
        for number, example in enumerate(examples):
            try:
                made.append(self._first.functions.example(example))
                good.append(number)
            except self._caught as error:
                letters[int(places[number])] = self._letter(error)
            except Exception as error:
                blame_rows(error, block, int(places[number]), 1, self.names[0])
                raise
        return made, np.array(good, np.int64)

    def _with_inputs(self, block: TableBlock) -> tuple[Indices, dict[int, Letter]]:
        """Return the rows that have all inputs, and dead letters for those in which one is null, if nulls fail."""
        seen = block.seen()
        letters: dict[int, Letter] = {}
        takes_nulls, key = self._takes_nulls, self._column.key
        for name in (() if key is None else (key,)) if takes_nulls else self._column.needed:
            column = decoded(block.table.column(name))  # a dictionary may hold a null, too
            if not column.null_count:
                continue
            lacking = np.flatnonzero(seen & column.is_null().to_numpy(zero_copy_only=False))
            if len(lacking) and self._column.nulls == "fail":
                letters |= dict.fromkeys(lacking.tolist(), self._letter(self._null_input(name, block, int(lacking[0]))))
            seen[lacking] = False
        return np.flatnonzero(seen), letters

    def _unknown_key(self, error: KeyError, block: TableBlock, place: int) -> TableError:
        """Return the error for a row whose key has no model."""
        found = TableError(
            f"the column {self.names[0]!r} has a model for each {self._column.key!r}: {error.args[0]}; the key is in "
            f"{block.row(place)}",
            fix="add a KeyModelMapping for the key, filter these rows out first, or get them as dead letters with "
            "Enrich(...).with_exception_handling()",
        )
        setattr(found, ELEMENT_AT_FAULT, block.row(place))
        return found

    def _null_input(self, name: str, block: TableBlock, place: int) -> ValueError:
        """Return the error for a dead letter; raise it if errors of its type are not caught."""
        caught = ValueError(f"{name!r} is null")
        if isinstance(caught, self._caught):
            return caught
        error = TableError(
            f"the column {self.names[0]!r} takes {name!r}, which is null in {block.row(place)}",
            fix=Fix(
                "pass Column(..., nulls='keep') to get a null for them, filter these rows out first, or get them as "
                "dead letters with Enrich(...).with_exception_handling()",
                command="add --nulls keep to get a null for them, filter these rows out first, or add "
                "--dead-letters PATH",
            ),
        )
        setattr(error, ELEMENT_AT_FAULT, block.row(place))
        raise error

    def _attempt(self, block: TableBlock, places: Indices, inputs: Block, model: Hashable) -> Attempt:
        try:
            return self._preparers[self.names[0], model].attempt(inputs, self._caught)
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
