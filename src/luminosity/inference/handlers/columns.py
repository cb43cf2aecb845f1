"""Examples made of numpy arrays, as Arrow columns and back. Columns are fast to slice, to join and to send.

An example is an array, or a dict or tuple of arrays; numbers and lists of numbers count as arrays. Examples of a single
array become an Arrow array, the others a record batch with a column for each of their arrays. A *ragged* array has a
first dimension that differs from example to example.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from luminosity.errors import InvalidArgument
from luminosity.inference.blocks import Block
from luminosity.inference.handlers.padding import Array, pad_rows

__all__ = [
    "Array",
    "Column",
    "Columns",
    "from_tensor",
    "lengths",
    "pad_ragged",
    "plain",
    "to_columns",
    "to_numpy",
    "to_tree",
]


Column: TypeAlias = Any
"""An Arrow array with one of the arrays of every example."""
Columns: TypeAlias = Block
"""A column, or a record batch of several."""

_TUPLE = {b"luminosity.examples": b"tuple"}


def to_columns(block: Block, ragged: bool | Collection[str] = False) -> Columns:
    """Return examples as columns. ``ragged`` is true, or names the ragged arrays of a dict.

    >>> to_columns([[1, 2], [3, 4]]).type, to_columns([[1], [3, 4]], ragged=True).type
    (FixedSizeListType(fixed_size_list<item: int64>[2]), LargeListType(large_list<item: int64>))
    >>> to_columns([{"x": 1.5, "y": [1, 2]}]).schema.names
    ['x', 'y']
    """
    if isinstance(block, pa.StructArray):
        block = pa.RecordBatch.from_struct_array(block)
    if isinstance(block, pa.RecordBatch):
        names: list[str] = block.schema.names
        return _record_batch(names, block.columns, block.schema.metadata, ragged)
    first: Any = block[0] if len(block) else 0.0
    if isinstance(first, dict):
        examples = cast("list[dict[Any, Any]]", block)
        return _record_batch(list(examples[0]), _of_dicts(examples), None, ragged)
    if isinstance(first, tuple):
        parts = _of_tuples(cast("list[tuple[Any, ...]]", block))
        return _record_batch([str(place) for place in range(len(parts))], parts, _TUPLE, ragged)
    if not isinstance(ragged, bool):
        raise InvalidArgument(
            f"found examples of a single array, expected dicts with the ragged arrays {sorted(ragged)}"
        )
    return _column(block, "", ragged)


def to_tree(columns: Columns, convert: Callable[[Column], Array]) -> Any:
    """Apply ``convert`` to each column; return the results in the form of an example: an array, a dict or a tuple."""
    if not isinstance(columns, pa.RecordBatch):
        return convert(columns)
    converted = [convert(column) for column in columns.columns]
    if columns.schema.metadata == _TUPLE:
        return tuple(converted)
    return dict(zip(columns.schema.names, converted, strict=True))


def to_numpy(column: Column) -> Array:
    """Return a column whose arrays have one shape as a numpy array, without copies if possible.

    >>> to_numpy(to_columns([[1, 2], [3, 4]])).tolist()
    [[1, 2], [3, 4]]
    """
    if pa.types.is_fixed_size_list(column.type):
        inner = to_numpy(column.flatten())
        return inner.reshape(len(column), column.type.list_size, *inner.shape[1:])
    kind = column.type
    letter = "f" if pa.types.is_floating(kind) else "u" if pa.types.is_unsigned_integer(kind) else "i"
    is_number = letter != "i" or pa.types.is_signed_integer(kind)
    if not is_number or not isinstance(column, pa.Array) or column.null_count or not len(column):
        return column.to_numpy(zero_copy_only=False)
    # Arrow's to_numpy() imports pandas if it is installed, which takes each process half a second.
    dtype = np.dtype(f"{letter}{kind.bit_width // 8}")
    values = np.frombuffer(column.buffers()[1], dtype, len(column), column.offset * dtype.itemsize)
    values.flags.writeable = False  # columns never change
    return values


def lengths(columns: Columns) -> npt.NDArray[np.int64] | None:
    """Return the length of the ragged arrays of each example, or None if there are none.

    >>> lengths(to_columns([[1], [3, 4]], ragged=True))
    array([1, 2])
    """
    found = columns.columns if isinstance(columns, pa.RecordBatch) else [columns]
    each = [_lengths(column) for column in found if pa.types.is_large_list(column.type)]
    if not each:
        return None
    for other in each[1:]:
        if not np.array_equal(each[0], other):
            place = int(np.flatnonzero(each[0] != other)[0])
            raise InvalidArgument(
                f"found ragged arrays of {each[0][place]} and {other[place]} items in one example, expected one length",
                fix="name the ragged arrays with ragged=[...], or pad the others",
            )
    return each[0]


def pad_ragged(column: Column, length: int, value: float) -> Array:
    """Return a ragged column as one array, its rows filled up to ``length`` with ``value``.

    >>> pad_ragged(to_columns([[1], [3, 4]], ragged=True), 3, 0).tolist()
    [[1, 0, 0], [3, 4, 0]]
    """
    return pad_rows(to_numpy(column.flatten()), _lengths(column), length, value)[0]


def _lengths(column: Column) -> npt.NDArray[np.int64]:
    return (
        pyarrow.compute.call_function("list_value_length", [column])
        .to_numpy(zero_copy_only=False)
        .astype(np.int64, copy=False)
    )


def _record_batch(
    names: list[str], parts: Sequence[Any], metadata: dict[bytes, bytes] | None, ragged: bool | Collection[str]
) -> Columns:
    if not isinstance(ragged, bool) and (unknown := sorted(set(ragged) - set(names))):
        raise InvalidArgument(f"found examples with {names}, expected the ragged arrays {unknown} among them")
    columns = [
        _column(part, name, ragged if isinstance(ragged, bool) else name in ragged)
        for name, part in zip(names, parts, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, names=names).replace_schema_metadata(metadata)


def _of_dicts(examples: list[dict[Any, Any]]) -> list[list[Any]]:
    names = examples[0].keys()
    if not all(isinstance(name, str) for name in names):
        raise InvalidArgument(f"found an example with {list(names)}, expected names that are strings")
    for example in examples:
        if example.keys() != names:
            raise InvalidArgument(
                f"found an example with {sorted(example)}, expected {sorted(names)} as in the first one"
            )
    return [[example[name] for example in examples] for name in names]


def _of_tuples(examples: list[tuple[Any, ...]]) -> list[list[Any]]:
    sizes = {len(example) for example in examples}
    if len(sizes) > 1:
        raise InvalidArgument(f"found examples that are tuples of {sorted(sizes)} arrays, expected one number")
    return [list(part) for part in zip(*examples, strict=True)]


def _column(values: Any, name: str, ragged: bool) -> Column:
    if isinstance(values, pa.Array):
        return _from_arrow(values, name, ragged)
    if ragged and np.ndim(values[0] if len(values) else 0.0) > 0:
        return _ragged([np.asarray(value) for value in values], name)
    return _fixed(values if isinstance(values, np.ndarray) else _stacked(values, name), name)


def _from_arrow(column: Column, name: str, ragged: bool) -> Column:
    if column.null_count:
        raise InvalidArgument(f"found {column.null_count} null value(s){_of(name)}, expected numbers in every example")
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        return column
    inner = _from_arrow(column.flatten(), name, False)
    sizes = _lengths(column)
    if ragged:
        return pa.LargeListArray.from_arrays(_offsets(sizes), inner)
    if len(set(sizes.tolist())) > 1:
        raise _shapes_differ({(size,) for size in sizes.tolist()}, name)
    return pa.FixedSizeListArray.from_arrays(inner, int(sizes[0]) if len(sizes) else 1)


def _shapes_differ(shapes: Collection[tuple[int, ...]], name: str) -> InvalidArgument:
    return InvalidArgument(
        f"found arrays of shapes {sorted(shapes)[:3]}{_of(name)}, expected one shape",
        fix="pass ragged=True if their lengths differ",
    )


def _stacked(values: Sequence[Any], name: str) -> Array:
    if len(values) and isinstance(values[0], np.ndarray) and values[0].ndim:
        shapes = {np.shape(value) for value in values}
        if len(shapes) == 1:  # several times faster than np.stack
            return np.concatenate(values).reshape(len(values), *values[0].shape)
    try:
        return np.asarray(values)
    except ValueError:
        shapes = {np.shape(value) for value in values}
        raise _shapes_differ(shapes, name) from None


def _fixed(values: Array, name: str) -> Column:
    """Return arrays of one shape as nested lists of fixed size."""
    if values.dtype.kind not in "biuf" or values.dtype.itemsize > 8:
        raise InvalidArgument(
            f"found values of type {values.dtype}{_of(name)}, expected numbers of a type that Arrow has"
        )
    flat = np.ascontiguousarray(values).reshape(-1)
    if flat.dtype.kind in "iuf" and flat.dtype.isnative:  # pa.array() imports pandas, as to_numpy() does
        column = pa.Array.from_buffers(pa.from_numpy_dtype(flat.dtype), len(flat), [None, pa.py_buffer(flat)])
    else:
        column = pa.array(flat)
    for size in reversed(values.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column


def _ragged(values: list[Array], name: str) -> Column:
    filled = [value for value in values if len(value)] or values[
        :1
    ]  # np.concatenate turns integers into floats if one list is empty
    shapes = {value.shape[1:] for value in filled}
    if len(shapes) > 1:
        raise InvalidArgument(
            f"found ragged arrays whose rows have the shapes {sorted(shapes)[:3]}{_of(name)}, "
            "expected that only the first dimension differs"
        )
    sizes = np.fromiter((len(value) for value in values), np.int64, len(values))
    return pa.LargeListArray.from_arrays(_offsets(sizes), _fixed(np.concatenate(filled), name))


def _offsets(sizes: npt.NDArray[np.int64]) -> Column:
    return pa.array(np.concatenate(([0], np.cumsum(sizes))))


def _of(name: str) -> str:
    return f" in {name!r}" if name else ""


def from_tensor(tensor: Any) -> Any:
    """Return a torch tensor of any device and type as a numpy array. Numpy has no bfloat16, so it becomes float32."""
    return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy(force=True)


def plain(value: Any) -> Any:
    """Replace tensors, matrices and bfloat16 by numbers and vectors that Arrow knows.

    >>> plain({"scores": np.ones((1, 2), np.float32), "label": "good"})
    {'scores': [array([1., 1.], dtype=float32)], 'label': 'good'}
    """
    if isinstance(value, dict):
        return {name: plain(each) for name, each in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        branches = [plain(each) for each in cast("list[Any]", value)]
        return branches if isinstance(value, list) else tuple(branches)
    if hasattr(value, "detach"):
        return plain(from_tensor(value))
    if not isinstance(value, np.ndarray | np.generic):
        return value
    array: Any = value.astype(np.float32) if value.dtype.kind == "V" else value
    if array.ndim > 1:
        return [plain(each) for each in array]
    return array if array.ndim else array[()]
