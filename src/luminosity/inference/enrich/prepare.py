"""Rows made ready for models, once for all that want the same."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import apache_beam as beam
from apache_beam.metrics import Metrics

from luminosity.inference.enrich.column import Column
from luminosity.inference.enrich.messages import TableBlock
from luminosity.inference.enrich.models import model_of
from luminosity.inference.enrich.rows import RowPreparer
from luminosity.inference.handler import Handler
from luminosity.inference.steps.settings import StepSettings

__all__ = ["ROWS_PREPARED", "PrepareColumnsDoFn"]

ROWS_PREPARED = "rows_prepared"
"""A counter, in a namespace of the columns that share what is made of the rows."""


class PrepareColumnsDoFn(beam.DoFn):
    """Runs on CPU workers."""

    def __init__(self, columns: Mapping[str, Column], settings: StepSettings) -> None:
        self._columns = columns
        self._settings = settings

    def setup(self) -> None:
        self._settings.set_up_process()
        models = {name: model_of(column.handler) for name, column in self._columns.items()}
        for model in models.values():
            model.set_environment_vars()
        self._preparers = [
            RowPreparer(self._columns[names[0]], {name: models[name] for name in names}, self._settings.caught)
            for names in alike(self._columns, models)
        ]

    def process(self, block: TableBlock) -> Iterator[TableBlock]:
        prepared, failed = dict(block.prepared), dict(block.failed)
        for preparer in self._preparers:
            found, letters = preparer.prepare(block)
            prepared |= found
            failed = {**letters, **failed}  # The first to fail stays.
            rows = len(found[preparer.names[0]].places) + len(letters)
            Metrics.counter("+".join(preparer.names), ROWS_PREPARED).inc(rows)
        yield replace(block, prepared=prepared, failed=failed)


def alike(columns: Mapping[str, Column], models: Mapping[str, Handler[Any, Any, Any]]) -> list[list[str]]:
    """The columns whose models make the same of the same inputs."""
    groups: dict[Hashable, list[str]] = {}
    for name, model in models.items():
        key = model.prepare_key()
        inputs: Any = columns[name].inputs
        inputs = inputs if isinstance(inputs, str) else tuple(inputs.items() if isinstance(inputs, Mapping) else inputs)
        # One that has a `prepare` of its own may have inherited its key.
        whose: Hashable = name if key is None else (type(model).prepare, key, inputs)
        groups.setdefault(whose, []).append(name)
    return list(groups.values())
