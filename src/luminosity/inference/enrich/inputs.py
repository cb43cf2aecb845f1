"""Turns columns of a table into the inputs of a model: a column, a matrix, or several columns by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from luminosity.errors import InvalidType
from luminosity.inference.adapting.columnar import takes_names
from luminosity.inference.blocks import Block
from luminosity.inference.enrich.column import Column
from luminosity.inference.handlers.columns import to_numpy

__all__ = ["block_of", "check_number", "decoded", "examples_of"]


def block_of(table: pa.RecordBatch, column: Column) -> Block:
    """Return the inputs for a new column, without a Python object for each row.

    >>> from luminosity import JaxModelHandler
    >>> handler = JaxModelHandler(lambda params, batch: batch, ())
    >>> table = pa.record_batch({"a": [1, 2], "b": [0.5, 1.5]})
    >>> block_of(table, Column(handler, ["a", "b"])).tolist()
    [[1.0, 0.5], [2.0, 1.5]]
    >>> block_of(table, Column(handler, {"x": "b"})).schema.names
    ['x']
    """
    inputs = column.inputs
    if isinstance(inputs, str):
        values = decoded(table.column(inputs))
        if pa.types.is_struct(values.type) or not takes_names(column.handler):
            return values
    if not isinstance(inputs, Mapping) and takes_names(column.handler):
        inputs = {name: name for name in column.names}
    if isinstance(inputs, Mapping):
        arrays = [decoded(table.column(name)) for name in inputs.values()]
        return pa.RecordBatch.from_arrays(arrays, names=list(inputs))
    return _matrix(inputs, [decoded(table.column(name)) for name in inputs])


def examples_of(block: Block) -> list[Any]:
    """Return the inputs as a list of examples, for handlers that don't take columns.

    >>> examples_of(pa.array(["a", "b"])), examples_of(np.array([[1, 2], [3, 4]]))
    (['a', 'b'], [array([1, 2]), array([3, 4])])
    """
    if isinstance(block, pa.Array) and _is_vectors(block.type) and not block.flatten().null_count:
        return list(to_numpy(block))
    return list(block) if isinstance(block, np.ndarray) else block.to_pylist()


def _matrix(names: Sequence[str], columns: Sequence[Any]) -> npt.NDArray[Any]:
    arrays: list[npt.NDArray[Any]] = []
    for name, column in zip(names, columns, strict=True):
        check_number(name, column.type)
        arrays.append(column.to_numpy(zero_copy_only=False))
    matrix = np.empty((len(arrays[0]), len(arrays)), np.result_type(*arrays))
    for place, array in enumerate(arrays):
        matrix[:, place] = array
    return matrix


def check_number(name: str, kind: pa.DataType) -> None:
    """Raise unless a column of this type can be part of a vector."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise InvalidType(
            f"the column {name!r} holds {kind}, expected numbers, because a list of columns becomes a vector",
            fix="pass a dict of the model's names to columns, which may have any type",
        )


def decoded(column: Any) -> Any:
    """Return the column's values without dictionary encoding."""
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _is_vectors(kind: pa.DataType) -> bool:
    if not pa.types.is_fixed_size_list(kind):
        return False
    value: pa.DataType = kind.value_type
    return pa.types.is_integer(value) or pa.types.is_floating(value) or _is_vectors(value)
