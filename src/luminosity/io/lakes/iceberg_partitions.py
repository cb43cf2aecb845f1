"""The partitions of Iceberg tables: what ``partition_by`` means, which types it may have, and the value of each row."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from luminosity._shared.text import list_some
from luminosity.errors import Fix, InvalidArgument, WriteError

__all__ = ["check_spec", "partition_fields", "values_of"]

_TRANSFORM = re.compile(r"(\w+)\((?:(\d+)\s*,\s*)?(.+?)\)|(.+)")
_SHOWN_COLUMNS = 20
_FIELD_ID = b"PARQUET:field_id"
_FORMS = Fix("write partition_by=['lang', 'day(at)', 'bucket(16, id)', 'truncate(4, text)']")


def partition_fields(name: str, texts: Sequence[str], schema: pa.Schema) -> list[tuple[str, Any, str]]:
    """Return column, transform and name of each partition such as ``lang``, ``day(at)`` or ``bucket(16, id)``."""
    found = [_partition_field(name, text, schema) for text in texts]
    columns = [column for column, _, _ in found]
    for column, text in zip(columns, texts, strict=True):
        if columns.count(column) > 1:
            raise InvalidArgument(
                f"{name}: found partition_by={text!r} and another partition of {column!r}, expected one of each column"
            )
    return found


def _partition_field(name: str, text: str, schema: pa.Schema) -> tuple[str, Any, str]:
    from pyiceberg.exceptions import ValidationError
    from pyiceberg.transforms import UnknownTransform, parse_transform

    found = _TRANSFORM.fullmatch(text.strip())
    column = "" if found is None else found[4] or found[3]
    if found is None or column not in schema.names:
        raise InvalidArgument(
            f"{name}: found partition_by={text!r}, expected one of {list_some(schema.names, _SHOWN_COLUMNS)}"
        )
    kind = found[1] or "identity"
    try:
        transform = parse_transform(f"{kind}[{found[2]}]" if found[2] else kind)
    except (ValueError, ValidationError) as error:
        raise InvalidArgument(f"{name}: found partition_by={text!r}: {error}", fix=_FORMS) from error
    if isinstance(transform, UnknownTransform) or (found[2] is not None and not int(found[2])):
        raise InvalidArgument(
            f"{name}: found partition_by={text!r}, expected a column, or one with identity, year, month, day, hour, "
            "bucket or truncate, such as day(at) or bucket(16, id)",
            fix=_FORMS,
        )
    if not _can_transform(transform, schema.field(column)):
        raise InvalidArgument(
            f"{name}: found partition_by={text!r}, but the column {column!r} is {schema.field(column).type}, for which "
            f"there is no {kind}",
            fix=_FORMS,
        )
    return column, transform, column if kind == "identity" else f"{column}_{kind}"


def _can_transform(transform: Any, field: pa.Field) -> bool:
    from pyiceberg.io.pyarrow import pyarrow_to_schema

    if pa.types.is_nested(field.type):
        return False
    schema = pyarrow_to_schema(pa.schema([field.with_metadata({_FIELD_ID: b"1"})]))
    return bool(transform.can_transform(schema.find_type(1)))


def check_spec(name: str, spec: Any, schema: Any) -> None:
    """Raise if the table has partitions that are not written here."""
    sources = [field.source_id for field in spec.fields]
    top = {field.field_id for field in schema.fields}
    if len(set(sources)) < len(sources) or not top.issuperset(sources):
        raise WriteError(
            f"{name}: found the partitions {', '.join(map(str, spec.fields))}, expected none of a field inside a "
            "column, and one of each column",
            fix="write to another table, and let the engine that made this one merge it",
        )


def values_of(batch: pa.RecordBatch, spec: Any, schema: Any) -> list[pa.Array]:
    """Return the values of the partitions for each row."""
    values: list[pa.Array] = []
    for field in spec.fields:
        source = batch.column(schema.find_field(field.source_id).name)
        if pa.types.is_decimal(source.type):
            # Their 16 bytes may begin in the middle of a message, where pyiceberg does not take them: copy them.
            source = source.take(pa.array(np.arange(len(source))))
        values.append(field.transform.pyarrow_transform(schema.find_type(field.source_id))(source))
    return values
