"""One new column of a table: which model makes it, and of what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from apache_beam.ml.inference.base import KeyedModelHandler, ModelHandler

from luminosity.inference.adapt import without_functions
from luminosity.inference.checks import check_handler

__all__ = ["Column"]


@dataclass(frozen=True)
class Column:
    """A column that a model adds to a table.

    >>> from luminosity import Handler
    >>> class Lengths(Handler[str, int, None]):
    ...     def load_model(self):
    ...         return None
    ...
    ...     def predict(self, model, batch, inference_args=None):
    ...         return [len(text) for text in batch]
    >>> Column(Lengths(), "text").names
    ('text',)

    Args:
        handler: any ModelHandler, Beam's or ours.
        inputs: what an example is. The name of a column: its value. A sequence of names: a vector of these numbers. A
            mapping of the model's names to columns: a dict.
        output: the Arrow type of the new column, where the handler does not tell or another is wanted.
        inference_args: given to every call of the model.
    """

    handler: ModelHandler[Any, Any, Any]
    inputs: str | Sequence[str] | Mapping[str, str]
    output: pa.DataType | None = None
    inference_args: dict[str, Any] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_handler(self.handler)
        _check_takes_rows(self.handler)
        # A set has no order, and a matrix needs one.
        is_ordered = isinstance(self.inputs, Sequence | Mapping)  # pyright: ignore[reportUnnecessaryIsInstance]
        names = self.names if is_ordered else ()
        if not names or not all(isinstance(name, str) and name for name in (*names, *self.inputs)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"found inputs={self.inputs!r}, expected the name of a column, a list of names, "
                "or a dict of the model's names to columns"
            )
        if self.output is not None and not isinstance(self.output, pa.DataType):
            raise TypeError(f"found output={self.output!r}, expected an Arrow type such as pa.float32()")
        self.handler.validate_inference_args(self.inference_args)

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that it is made of."""
        if isinstance(self.inputs, str):
            return (self.inputs,)
        return tuple(self.inputs.values() if isinstance(self.inputs, Mapping) else self.inputs)


def _check_takes_rows(handler: ModelHandler[Any, Any, Any]) -> None:
    """Refuse what has no meaning for the rows of a table."""
    if isinstance(without_functions(handler), KeyedModelHandler):
        raise ValueError(
            "found a KeyedModelHandler, and rows of a table have no keys: give the handler within it to a Column, "
            "and where there are many, a Column for each"
        )
    if list(handler.get_preprocess_fns()) or list(handler.get_postprocess_fns()):
        raise ValueError(
            f"{type(without_functions(handler)).__name__} has functions before or after it (with_preprocess_fn, "
            "with_postprocess_fn), which take one row at a time: MapTable before or after Enrich does that for many"
        )
    if handler.should_skip_batching():
        raise ValueError("found with_no_batching(): each element is a batch then, and here it is a row; leave it out")
