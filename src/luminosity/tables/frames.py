"""Convert record batches to pandas and polars frames for a user's function, and back to their original types."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import pyarrow as pa

from luminosity.errors import Fix, InvalidArgument, InvalidType, TableError
from luminosity.extras import require
from luminosity.tables.from_python import has_open_type
from luminosity.tables.types import is_any_list

__all__ = ["Kind", "from_result", "kind_of", "name_of", "place_of", "to_frame"]


def name_of(fn: Callable[..., Any]) -> str:
    """Return the name of a function, or of the class of a callable object.

    >>> name_of(functools.partial(len)), name_of(lambda batch: batch)
    ('len', '<lambda>')
    """
    inner = _function(fn)
    return getattr(inner, "__name__", type(inner).__name__)


def place_of(fn: Callable[..., Any], error: BaseException | None = None) -> str:
    """Return file and line: of the line in the function that raised ``error``, otherwise of its first line."""
    inner = _function(fn)
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    if code is None:
        return "not written in Python"
    line = code.co_firstlineno
    if error is not None:
        lines = [at for frame, at in traceback.walk_tb(error.__traceback__) if frame.f_code is code]
        line = lines[-1] if lines else line
    return f"{code.co_filename}:{line}"


def _function(fn: Any) -> Any:
    return _function(fn.func) if isinstance(fn, functools.partial) else getattr(fn, "__func__", fn)


Kind: TypeAlias = Literal["arrow", "table", "pandas", "polars"]
_FRAMES: dict[tuple[str, str], Kind] = {
    ("pyarrow", "RecordBatch"): "arrow",
    ("pyarrow", "Table"): "table",
    ("pandas", "DataFrame"): "pandas",
    ("polars", "DataFrame"): "polars",
}
_ALIASES = {"pa": "pyarrow", "pd": "pandas", "pl": "polars"}
_EXPECTED: dict[Kind, str] = {
    "arrow": "pyarrow.RecordBatch or pyarrow.Table",
    "table": "pyarrow.RecordBatch or pyarrow.Table",
    "pandas": "pandas.DataFrame (or pyarrow.RecordBatch or pyarrow.Table)",
    "polars": "polars.DataFrame (or pyarrow.RecordBatch or pyarrow.Table)",
}


def kind_of(fn: Callable[..., Any], as_: str | None) -> Kind:
    """Return what a function takes: ``as_``, or the annotation of its first parameter, or Arrow.

    >>> def clean(frame: "pd.DataFrame"): ...
    >>> kind_of(clean, None), kind_of(len, None), kind_of(len, "polars")
    ('pandas', 'arrow', 'polars')
    """
    if as_ is not None:
        if as_ not in ("arrow", "pandas", "polars"):
            raise InvalidArgument(f"found as_={as_!r}, expected 'arrow', 'pandas' or 'polars'")
        return as_
    annotation = _first_annotation(fn)
    if annotation is None or annotation in (Any, object):
        return "arrow"
    if isinstance(annotation, str):
        module, _, name = annotation.rpartition(".")
    else:
        module, name = getattr(annotation, "__module__", ""), getattr(annotation, "__name__", "")
    library = _ALIASES.get(module, module.partition(".")[0])
    kind = _FRAMES.get((library, name))
    if kind is None:
        raise InvalidType(
            f"{name_of(fn)} ({place_of(fn)}) takes {annotation}, expected pyarrow.RecordBatch, pyarrow.Table, "
            "pandas.DataFrame or polars.DataFrame",
            fix=Fix("change the annotation, or pass MapTable(..., as_='arrow'), as_='pandas' or as_='polars'"),
        )
    return kind


def to_frame(batch: pa.RecordBatch, kind: Kind) -> Any:
    """Return the batch as the function takes it."""
    if kind == "pandas":
        return _to_pandas(batch)
    if kind == "polars":
        return require("polars", "polars").from_arrow(batch)
    return pa.Table.from_batches([batch]) if kind == "table" else batch


def from_result(result: Any, kind: Kind, who: str, given: pa.Schema, schema: pa.Schema | None) -> pa.RecordBatch:
    """Return the result of a function as one batch; a frame's columns keep the types that they were given in."""
    if isinstance(result, pa.RecordBatch):
        return result
    if isinstance(result, pa.Table):
        return _one_batch(result)
    library, name = type(result).__module__.partition(".")[0], type(result).__name__
    if (kind, library, name) == ("polars", "polars", "DataFrame"):
        return with_original_types(_one_batch(result.to_arrow()), given, schema, who)
    if (kind, library, name) == ("pandas", "pandas", "DataFrame"):
        return with_original_types(_from_pandas(result, schema, who), given, schema, who)
    fix = "check for a missing return" if result is None else "call .collect() on it" if name == "LazyFrame" else None
    found = name if library == "builtins" else f"{library}.{name}"
    raise TableError(f"{who} returned {found}, expected {_EXPECTED[kind]}", fix=fix)


def _first_annotation(fn: Callable[..., Any]) -> Any:
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (ValueError, TypeError):  # The function is not written in Python.
        return None
    if not parameters or parameters[0].annotation is inspect.Parameter.empty:
        return None
    annotation = parameters[0].annotation
    if not isinstance(annotation, str):
        return annotation
    try:
        return inspect.signature(fn, eval_str=True).parameters[parameters[0].name].annotation
    except Exception:  # A name was imported for type checkers only: use the text.
        return annotation


def _to_pandas(batch: pa.RecordBatch) -> Any:
    """Return the usual pandas frame, with nullable types for integers and booleans that have nulls.

    They would become floats and objects otherwise, and have another type than in a batch without nulls.
    """
    pandas = require("pandas", "pandas")
    nullable: dict[pa.DataType, Any] = {pa.bool_(): pandas.BooleanDtype()}
    for bits in (8, 16, 32, 64):
        nullable[getattr(pa, f"int{bits}")()] = getattr(pandas, f"Int{bits}Dtype")()
        nullable[getattr(pa, f"uint{bits}")()] = getattr(pandas, f"UInt{bits}Dtype")()
    with_nulls = {column.type for column in batch.columns if column.null_count}
    return batch.to_pandas(types_mapper={kind: nullable[kind] for kind in with_nulls & nullable.keys()}.get)


def _from_pandas(frame: Any, schema: pa.Schema | None, who: str) -> pa.RecordBatch:
    if not all(isinstance(name, str) for name in frame.columns):
        raise TableError(f"{who} returned a frame with the columns {list(frame.columns)}, expected texts as names")
    # If names differ, leave the message to the check of the schema.
    fits = schema is not None and sorted(schema.names) == sorted(frame.columns)
    try:
        batch = pa.RecordBatch.from_pandas(frame, schema=schema if fits else None, preserve_index=False)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        details = ": ".join(str(part) for part in reversed(error.args))
        raise TableError(f"{who} returned a frame that can't become a table: {details}") from error
    return batch.replace_schema_metadata(None)


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    """Return the table as one batch; columns in one chunk are not copied."""
    if not table.num_columns or not table.num_rows:
        return pa.RecordBatch.from_pylist([], schema=table.schema)
    arrays = [column.chunk(0) if column.num_chunks == 1 else column.combine_chunks() for column in table.columns]
    return pa.RecordBatch.from_arrays(arrays, schema=table.schema)


def with_original_types(result: pa.RecordBatch, given: pa.Schema, schema: pa.Schema | None, who: str) -> pa.RecordBatch:
    """Return a frame's columns with the types of the columns that it was given, if only the form of the type differs.

    For example, pandas turns fixed-size lists into lists, and polars turns strings into large strings.

    >>> vectors = pa.schema([("v", pa.list_(pa.float64(), 2))])
    >>> with_original_types(pa.record_batch({"v": [[0.5, 1.0]]}), vectors, None, "f").schema.types
    [FixedSizeListType(fixed_size_list<item: double>[2])]
    """
    fields: list[pa.Field] = []
    arrays: list[pa.Array] = []
    for field, array in zip(result.schema, result.columns, strict=True):
        if schema is None:
            array = _as_given(array, given.field(field.name).type if field.name in given.names else None)
            is_as_given = field.name in given.names and array.type == given.field(field.name).type
            if has_open_type(array.type) and result.num_rows and not is_as_given:
                raise TableError(
                    f"{who}: nothing in {result.num_rows} rows shows the type of the new column {field.name!r} "
                    f"(found {array.type})",
                    fix=Fix("pass MapTable(..., schema=pa.schema([...]))"),
                )
        fields.append(pa.field(field.name, array.type))
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def _as_given(array: pa.Array, given: pa.DataType | None) -> pa.Array:
    if array.type == given:
        return array
    if given is not None and (pa.types.is_null(array.type) or _form(array.type) == _form(given)):
        try:
            return array.cast(given)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            pass  # Lists have another length now, or decimals more digits: keep the new type.
    small = _small(array.type)
    return array if small == array.type else array.cast(small)


def _form(kind: pa.DataType) -> object:
    """Return a value that is equal for types that hold the same values."""
    if pa.types.is_dictionary(kind):
        return "dictionary", _form(kind.value_type)
    if pa.types.is_decimal(kind):
        return "decimal"
    if pa.types.is_time(kind):
        return "time"
    if pa.types.is_map(kind):
        return "map", _form(kind.key_type), _form(kind.item_type)
    if is_any_list(kind):
        return "list", _form(kind.value_type)
    if pa.types.is_struct(kind):
        return "struct", tuple((field.name, _form(field.type)) for field in kind)
    return _small(kind)


def _small(kind: pa.DataType) -> pa.DataType:
    """Return the usual type for a large one. polars has only large strings and lists; other libraries prefer these."""
    if pa.types.is_large_string(kind) or str(kind) == "string_view":
        return pa.string()
    if pa.types.is_large_binary(kind) or str(kind) == "binary_view":
        return pa.binary()
    if pa.types.is_large_list(kind) or pa.types.is_list(kind):
        return pa.list_(_small(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _small(field.type)) for field in kind])
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _small(kind.value_type), kind.ordered)
    return kind
