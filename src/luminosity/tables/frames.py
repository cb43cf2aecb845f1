"""Record batches as pandas and polars frames, and back to the types that they had."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import pyarrow as pa

from luminosity.errors import TableError
from luminosity.extras import require
from luminosity.tables.forms import with_original_types
from luminosity.tables.function_names import name_of, place_of

__all__ = ["Kind", "from_result", "kind_of", "to_frame"]

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
    """What a function wants: said by `as_`, else by the annotation of its first parameter, else Arrow.

    >>> def clean(frame: "pd.DataFrame"): ...
    >>> kind_of(clean, None), kind_of(len, None), kind_of(len, "polars")
    ('pandas', 'arrow', 'polars')
    """
    if as_ is not None:
        if as_ not in ("arrow", "pandas", "polars"):
            raise ValueError(f"found as_={as_!r}, expected 'arrow', 'pandas' or 'polars'")
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
        raise TypeError(
            f"{name_of(fn)} ({place_of(fn)}) takes {annotation}; expected an annotation with pyarrow.RecordBatch, "
            "pyarrow.Table, pandas.DataFrame or polars.DataFrame, or MapTable(..., as_='arrow', 'pandas' or 'polars')"
        )
    return kind


def to_frame(batch: pa.RecordBatch, kind: Kind) -> Any:
    if kind == "pandas":
        return _to_pandas(batch)
    if kind == "polars":
        return require("polars", "polars").from_arrow(batch)
    return pa.Table.from_batches([batch]) if kind == "table" else batch


def from_result(result: Any, kind: Kind, who: str, given: pa.Schema, schema: pa.Schema | None) -> pa.RecordBatch:
    """What a function returned, as one batch; columns of a frame as they were, where only their form differs."""
    if isinstance(result, pa.RecordBatch):
        return result
    if isinstance(result, pa.Table):
        return _one_batch(result)
    library, name = type(result).__module__.partition(".")[0], type(result).__name__
    if (kind, library, name) == ("polars", "polars", "DataFrame"):
        return with_original_types(_one_batch(result.to_arrow()), given, schema, who)
    if (kind, library, name) == ("pandas", "pandas", "DataFrame"):
        return with_original_types(_from_pandas(result, schema, who), given, schema, who)
    hint = "; is a return missing?" if result is None else "; call .collect() on it" if name == "LazyFrame" else ""
    found = name if library == "builtins" else f"{library}.{name}"
    raise TableError(f"{who} returned {found}, expected {_EXPECTED[kind]}{hint}")


def _first_annotation(fn: Callable[..., Any]) -> Any:
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (ValueError, TypeError):  # Functions that are not written in Python.
        return None
    if not parameters or parameters[0].annotation is inspect.Parameter.empty:
        return None
    annotation = parameters[0].annotation
    if not isinstance(annotation, str):
        return annotation
    try:
        return inspect.signature(fn, eval_str=True).parameters[parameters[0].name].annotation
    except Exception:  # What it names was imported for type checkers alone: the text must do.
        return annotation


def _to_pandas(batch: pa.RecordBatch) -> Any:
    """As everyone knows them, but integers and booleans with nulls stay so, in pandas' own nullable types.

    They would become floats and objects, and so be of another type than in a batch without nulls.
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
        raise TableError(
            f"{who} returned a frame with the columns {list(frame.columns)}, expected names that are texts"
        )
    # Where names differ, the message should be that of a schema that does not fit.
    fits = schema is not None and sorted(schema.names) == sorted(frame.columns)
    try:
        batch = pa.RecordBatch.from_pandas(frame, schema=schema if fits else None, preserve_index=False)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        what = ": ".join(str(part) for part in reversed(error.args))
        raise TableError(f"{who} returned a frame that is no table. {what}") from error
    return batch.replace_schema_metadata(None)


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    """Nothing is copied where each column is in one piece already."""
    if not table.num_columns or not table.num_rows:
        return pa.RecordBatch.from_pylist([], schema=table.schema)
    arrays = [column.chunk(0) if column.num_chunks == 1 else column.combine_chunks() for column in table.columns]
    return pa.RecordBatch.from_arrays(arrays, schema=table.schema)
