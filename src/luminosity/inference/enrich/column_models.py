"""The models of a column, with all hooks: one, or one for each key; and the functions before and after them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pyarrow as pa
from apache_beam.ml.inference.base import ModelHandler, PredictionResult

from luminosity.errors import InvalidArgument
from luminosity.inference.adapting.adapt import ModelSet, adapt, without_functions
from luminosity.inference.adapting.columnar import TensorExamplesHandler, takes_tensors, whole_columns
from luminosity.inference.adapting.wrapping import WrappedHandler
from luminosity.inference.blocks import Block, rows
from luminosity.inference.enrich.column import Column
from luminosity.inference.handler import Handler
from luminosity.inference.handlers.columns import from_tensor
from luminosity.inference.steps.expanding import ModelNeeds

__all__ = ["ColumnModels", "Functions"]


class ColumnModels:
    """What the steps of ``Enrich`` know about the models of a column.

    ``set`` has the handlers by name; their predictions are plain values, not ``PredictionResult``.
    """

    def __init__(self, name: str, column: Column) -> None:
        self._name = name
        self._column = column
        self.set = ModelSet(column.handler, _model_of)
        self.functions = Functions(column)

    @property
    def handlers(self) -> list[Handler[Any, Any, Any]]:
        """The handlers of all models."""
        return list(self.set.handlers.values())

    @property
    def first(self) -> Handler[Any, Any, Any]:
        """The handler of the first model, or of the only one."""
        return self.handlers[0]

    @property
    def takes_columns(self) -> bool:
        """Whether the model takes whole columns, so that no row is looked at by itself."""
        return self.first.columnar and not self.set.is_keyed and not self.functions.before

    @property
    def output_type(self) -> pa.DataType | None:
        """The type of the new column; None if only the values tell."""
        if self._column.output is not None:
            return self._column.output
        kinds = [each.output_type for each in self.handlers]
        return None if self.functions.after or any(kind != kinds[0] for kind in kinds) else kinds[0]

    @property
    def computes_once(self) -> bool:
        """Whether rows with equal inputs are computed once. Raises if that is asked of a model that draws by chance."""
        found = [each.is_repeatable(self._column.inference_args) for each in self.handlers]
        if self._column.dedupe and False in found:
            raise InvalidArgument(
                f"found dedupe=True for the column {self._name!r}, but {self.first} draws its answers by chance",
                fix="leave out dedupe=, or turn the sampling off",
            )
        return all(found) if self._column.dedupe is None else self._column.dedupe

    def needs(self, hints: dict[str, Any]) -> ModelNeeds:
        """Return the resources of the models. Raises if they can't run in one step."""
        found = [ModelNeeds.of(each, hints) for each in self.handlers]
        for each in found:
            if not each.can_share(found[0]):
                raise InvalidArgument(
                    f"the models of the column {self._name!r} need different resources, expected the same for all keys",
                    fix="set the hints with Enrich(...).with_resource_hints(...)",
                )
        return found[0]


class Functions:
    """The functions before and after a model (``with_preprocess_fn``, ``with_postprocess_fn``), in their order."""

    def __init__(self, column: Column) -> None:
        self.before = list(column.handler.get_preprocess_fns())
        self.after = list(column.handler.get_postprocess_fns())
        self._is_keyed = column.key is not None

    def example(self, value: Any) -> Any:
        """Return the example of the model for the value of a row."""
        for function in self.before:
            value = function(value)
        return value

    def prediction(self, example: Any, value: Any, model_id: str | None) -> Any:
        """Return what the functions after the model make of a prediction; they get a ``PredictionResult``."""
        key: Hashable = None
        if self._is_keyed:
            key, example = example
        result: Any = PredictionResult(example, value, model_id)
        result = (key, result) if self._is_keyed else result
        for function in self.after:
            result = function(result)
        if self._is_keyed and isinstance(result, tuple) and not isinstance(result, PredictionResult):
            result = result[1]
        return _value(result)


def _model_of(handler: ModelHandler[Any, Any, Any]) -> Handler[Any, Any, Any]:
    """Return the handler with all hooks, without the functions before and after it."""
    handler = without_functions(handler)
    if isinstance(handler, Handler):
        return handler
    return whole_columns(handler) or _Values(
        TensorExamplesHandler(adapt(handler)) if takes_tensors(handler) else adapt(handler)
    )


class _Values(WrappedHandler):
    """Takes the values out of the ``PredictionResult`` that Beam's handlers return."""

    def collect(self, outputs: Any) -> Block:
        return [_value(each) for each in rows(super().collect(outputs))]


def _value(result: Any) -> Any:
    value: Any = result.inference if isinstance(result, PredictionResult) else result
    return from_tensor(value) if hasattr(value, "detach") else value
