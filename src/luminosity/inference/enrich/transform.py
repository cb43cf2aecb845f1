"""``Enrich``: any number of models over a table, with a new column for each."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import apache_beam as beam
import pyarrow as pa

from luminosity.core import OF_BLOCKS
from luminosity.errors import InvalidArgument, InvalidType
from luminosity.inference.adapting.adapt import check_batching, check_files
from luminosity.inference.enrich.column import Column, levels
from luminosity.inference.enrich.column_models import ColumnModels
from luminosity.inference.enrich.infer_columns import InferColumnsDoFn
from luminosity.inference.enrich.prepare_columns import PrepareColumnsDoFn
from luminosity.inference.enrich.table_steps import FAILED, BeginDoFn, FinishDoFn, TableBlock, check_schema
from luminosity.inference.prompts.prompt import Prompt
from luminosity.inference.steps.expanding import ModelNeeds, ModelTransform, by_needs, run_models
from luminosity.inference.steps.messages import StepSettings
from luminosity.inference.steps.pinning import PinnedModels, annotate_models, pin_models
from luminosity.inference.steps.updates import warn_without_updates
from luminosity.tables.schemas import known_schema

__all__ = ["Enrich"]


class Enrich(ModelTransform):
    """Adds a column to a table for each model.

    A table is a collection of ``pyarrow.RecordBatch``; rows keep their order in a batch. All models share the model
    host, and models with the same tokenizer share the tokenised texts. A model may take the new column of another.

    >>> import apache_beam as beam
    >>> import pyarrow as pa
    >>> from luminosity import Column, Enrich, Handler
    >>> class Lengths(Handler[str, int, None]):
    ...     def load_model(self):
    ...         return None
    ...
    ...     def predict(self, model, batch, inference_args=None):
    ...         return [len(text) for text in batch]
    >>> with beam.Pipeline(runner="FnApiRunner") as pipeline:
    ...     table = pipeline | beam.Create([pa.record_batch({"text": ["one", "three"]})])
    ...     _ = table | Enrich(length=Column(Lengths(), "text")) | beam.Map(lambda batch: print(batch.to_pylist()))
    [{'text': 'one', 'length': 3}, {'text': 'three', 'length': 5}]

    Models skip rows whose ``_deleted`` is true; the new columns of these rows are null. Resource hints of handlers and
    of this transform apply only to the steps that run models.

    With ``with_exception_handling()`` it returns two tables, ``(good, bad)``. A row on which a model fails is in
    ``bad``, with its original columns, the name of the new column in ``_model`` and the error in ``_reason``. It is not
    in ``good``, and later models don't see it.

    Args:
        columns: a ``Column`` for each new column, by its name; or a ``Prompt``, which names its columns itself.
    """

    def __init__(self, /, **columns: Column | Prompt) -> None:
        super().__init__()
        if not columns:
            raise InvalidArgument(
                "found no columns, expected at least one", fix="pass Enrich(name=Column(handler, inputs))"
            )
        self._columns = {name: _column_of(name, column) for name, column in columns.items()}
        self._levels = levels(self._columns)
        self._step_id = uuid.uuid4().hex

    def check(self, schema: pa.Schema) -> None:
        """Raise if a table with these columns can't be enriched: before a long pipeline runs, or in a test.

        The pipeline is checked when it is built if ``ReadTable`` comes right before, or ``MapTable`` with ``schema=``.
        """
        check_schema(schema, self._columns)

    def annotations(self) -> dict[str, Any]:
        """Return the transform's annotations, with the handler of each column."""
        models = {name: ColumnModels(name, column) for name, column in self._columns.items()}
        handlers = {name: ", ".join(map(str, each.handlers)) for name, each in models.items()}
        named = {f"model_handler_of_{name}": handler for name, handler in handlers.items()}
        paths = annotate_models(*(column.handler for column in self._columns.values()))
        return {**named, **paths, **super().annotations()}

    def expand(self, input_or_inputs: Any) -> Any:
        """Apply the steps of all models; return the table, or ``(good, bad)`` with exception handling."""
        self._running, self._pinned = self._pin(input_or_inputs.pipeline)
        models = {name: ColumnModels(name, column) for name, column in self._running.items()}
        handlers = [handler for each in models.values() for handler in each.handlers]
        check_batching(handlers)
        if (schema := known_schema(input_or_inputs)) is not None:
            check_schema(schema, self._running)
        check_files(handlers, input_or_inputs.pipeline)
        self._slow = [name for name, each in models.items() if not each.takes_columns]
        """Columns whose models prepare each row, or may do so."""
        self._watches = {
            name: column.updates.watch(models[name].set, self._pinned[name]) for name, column in self._running.items()
        }
        for name, column in self._running.items():
            _ = models[name].computes_once  # raises if that can't be
            if column.watch_model_pattern is not None:
                warn_without_updates(models[name].set)
        begin = beam.ParDo(BeginDoFn(self._running, cuts=bool(self._slow)))
        blocks = input_or_inputs | "Begin" >> begin.with_output_types(TableBlock)
        if self._slow:
            blocks = blocks | "Spread" >> beam.Reshuffle()  # share the rows of one file between all workers
        settings = StepSettings(step_id=self._step_id, model_tag="", metrics_namespace="")
        settings = self._settings_for(input_or_inputs, settings, handlers)
        for names in self._levels:
            blocks = self._prepare(blocks, names, settings)
            for needs, group in by_needs({name: models[name].needs(self._hints) for name in names}):
                blocks = self._infer(blocks, group, settings, needs)
        return self._finish(blocks)

    def _pin(self, pipeline: beam.Pipeline) -> tuple[dict[str, Column], dict[str, PinnedModels]]:
        """Return the columns with the versions of their models that a registry names now, and these versions."""
        columns: dict[str, Column] = {}
        found: dict[str, PinnedModels] = {}
        by_handler: dict[int, PinnedModels] = {}  # a handler of two columns stays one
        for name, column in self._columns.items():
            if id(column.handler) not in by_handler:
                by_handler[id(column.handler)] = pin_models(column.handler, pipeline)
            pinned = by_handler[id(column.handler)]
            columns[name] = replace(column, handler=pinned.handler)
            found[name] = pinned
        return columns, found

    def _prepare(self, blocks: Any, names: Sequence[str], settings: StepSettings) -> Any:
        mine = {name: self._running[name] for name in names if name in self._slow}
        if not mine:
            return blocks
        prepare = beam.ParDo(PrepareColumnsDoFn(mine, settings))
        return blocks | self._label("Prepare", list(mine)) >> prepare.with_output_types(TableBlock)

    def _infer(self, blocks: Any, names: Sequence[str], settings: StepSettings, needs: ModelNeeds) -> Any:
        infer = beam.ParDo(
            InferColumnsDoFn(
                {name: self._running[name] for name in names},
                {name: self._settings_of(name, settings) for name in names},
            )
        ).with_output_types(TableBlock)
        sorts = OF_BLOCKS if any(name in self._slow for name in names) else None
        versions = [each for name in names for each in self._pinned[name].registered.values()]
        return run_models(blocks, self._label("Infer", names), infer, needs, versions, sorts)

    def _settings_of(self, name: str, settings: StepSettings) -> StepSettings:
        column = self._columns[name]
        # A handler used for two columns is one model.
        first = next(each for each, other in self._columns.items() if other.handler is column.handler)
        return replace(
            settings,
            step_id=f"{settings.step_id}/{name}",
            model_tag=f"{settings.step_id}/{first}",
            metrics_namespace=name,
            inference_args=column.inference_args,
            updates_may_lag=True,
            watch=self._watches[name],
            registered=self._pinned[name].registered,
        )

    def _label(self, step: str, names: Sequence[str]) -> str:
        return step if len(self._columns) == len(names) else f"{step} {', '.join(names)}"

    def _finish(self, blocks: Any) -> Any:
        finish = beam.ParDo(FinishDoFn(list(self._columns)))
        if self._handling is None:
            return blocks | "Finish" >> finish.with_output_types(pa.RecordBatch)
        outputs = blocks | "Finish" >> finish.with_outputs(FAILED, main="good").with_output_types(pa.RecordBatch)
        good, bad = outputs.good, outputs[FAILED]
        bad.element_type = pa.RecordBatch
        self._check_threshold(good, bad, _rows)
        return good, bad


def _column_of(name: str, column: Any) -> Column:
    if isinstance(column, Prompt):
        return Column(column, {each: each for each in column.columns})
    if not isinstance(column, Column):
        kind = type(column).__name__
        raise InvalidType(
            f"found {name}= of type {kind}, expected {name}=Column(handler, inputs) or {name}=Prompt(...)"
        )
    return column


def _rows(table: pa.RecordBatch) -> int:
    return table.num_rows
