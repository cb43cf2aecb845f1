"""Turns the predictions of a model, batch by batch, into one Arrow column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from luminosity.errors import Fix, InvalidArgument
from luminosity.inference.blocks import Block, Indices, join
from luminosity.inference.handlers.columns import plain, to_columns

__all__ = ["NewColumn"]


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
