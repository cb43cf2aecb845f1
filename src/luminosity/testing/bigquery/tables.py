"""The tables of a fake BigQuery: their columns, the rows in them, and the rules by which rows and jobs are refused."""

from __future__ import annotations

import base64
import datetime
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import fastavro
from apache_beam.io.filesystems import FileSystems

__all__ = ["Field", "Refused", "Row", "RowRefused", "StoredTable", "checked_row", "normal_fields", "rows_of_file"]

Field = dict[str, Any]
Row = dict[str, Any]

# BigQuery has two names for most types; the older ones are those of its REST API.
_TYPES = {"INT64": "INTEGER", "FLOAT64": "FLOAT", "BOOL": "BOOLEAN", "STRUCT": "RECORD", "DECIMAL": "NUMERIC"}
_DATES: dict[str, Any] = {"DATE": datetime.date, "TIME": datetime.time, "DATETIME": datetime.datetime}


class Refused(Exception):
    """A request or a job that BigQuery would refuse, with its words for the reason, and the HTTP status."""

    def __init__(self, message: str, reason: str = "invalid", status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.status = status


class RowRefused(Exception):
    """A row that does not fit the columns of its table."""

    def __init__(self, message: str, column: str) -> None:
        super().__init__(message)
        self.message = message
        self.column = column


@dataclass
class StoredTable:
    """A table: its columns, as the REST API describes them, and its rows."""

    fields: list[Field]
    rows: list[Row] = field(default_factory=list)
    insert_ids: set[str] = field(default_factory=lambda: set())

    @property
    def size(self) -> int:
        """The bytes of all rows, about as BigQuery counts them."""
        return sum(map(_size, self.rows))

    def check_same_columns(self, fields: Sequence[Field], name: str) -> None:
        """Raise if a job brings other columns than the table has."""
        have, found = _columns(self.fields), _columns(fields)
        for column in {**have, **found}:
            if column not in found:
                raise Refused(f"Provided Schema does not match Table {name}. Field {column} is missing in new schema")
            if column not in have:
                raise Refused(f"Provided Schema does not match Table {name}. Cannot add fields (field: {column})")
            if have[column] != found[column]:
                was, now = " ".join(have[column]), " ".join(found[column])
                raise Refused(
                    f"Provided Schema does not match Table {name}. Field {column} has changed from {was} to {now}"
                )


def normal_fields(fields: Iterable[Mapping[str, Any]]) -> list[Field]:
    """Return columns with one spelling of each type and mode.

    >>> normal_fields([{"name": "id", "type": "int64"}])
    [{'name': 'id', 'type': 'INTEGER', 'mode': 'NULLABLE'}]
    """
    normal: list[Field] = []
    for each in fields:
        kind = str(each["type"]).upper()
        described = {"name": each["name"], "type": _TYPES.get(kind, kind), "mode": each.get("mode") or "NULLABLE"}
        if each.get("fields"):
            described["fields"] = normal_fields(each["fields"])
        normal.append(described)
    return normal


def checked_row(
    row: Mapping[str, Any], fields: Sequence[Field], path: str = "", *, ignore_unknown: bool = False
) -> Row:
    """Return a row with Python's values for all columns, or raise :class:`RowRefused`.

    >>> columns = [{"name": "id", "type": "INTEGER", "mode": "REQUIRED"}]
    >>> checked_row({"id": "7"}, columns)
    {'id': 7}
    """
    names = {each["name"].lower(): each for each in fields}
    given: Row = {}
    for name, value in row.items():
        known = names.get(name.lower())
        if known is not None:
            given[known["name"]] = value
        elif not ignore_unknown:
            raise RowRefused(f"no such field: {path}{name}.", path + name)
    return {each["name"]: _value(given.get(each["name"]), each, path + each["name"]) for each in fields}


def rows_of_file(uri: str, source_format: str) -> Iterator[Row]:
    """Yield the rows of a file on any of Beam's file systems, or raise :class:`Refused`."""
    try:
        file = FileSystems.open(uri)
    except Exception as error:
        raise Refused(f"Not found: URI {uri}: {error}", "notFound") from error
    with file:
        if source_format == "AVRO":
            records: Any = fastavro.reader(file)
            yield from records
        elif source_format == "NEWLINE_DELIMITED_JSON":
            for number, line in enumerate(file, 1):
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise Refused(f"Error while reading data, line {number} of {uri}: {error}") from error
        else:
            raise Refused(f"FakeBigQuery loads AVRO and NEWLINE_DELIMITED_JSON, found {source_format}")


def _size(value: Any) -> int:
    """Return the bytes of a value, about as BigQuery counts them.

    >>> _size({"id": 7, "text": "ä", "words": ["a", "b"], "none": None})
    18
    """
    if value is None or isinstance(value, bool):
        return int(value is not None)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if isinstance(value, list):
        return sum(map(_size, value))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if isinstance(value, (bytes, str)):
        return 2 + len(value.encode() if isinstance(value, str) else value)
    return 16 if isinstance(value, Decimal) else 8


def _columns(fields: Sequence[Field], path: str = "") -> dict[str, tuple[str, str]]:
    columns: dict[str, tuple[str, str]] = {}
    for each in fields:
        columns[path + each["name"]] = (each["type"], each["mode"])
        columns |= _columns(each.get("fields", ()), f"{path}{each['name']}.")
    return columns


def _value(value: Any, column: Field, path: str) -> Any:
    if column["mode"] == "REPEATED":
        if not isinstance(value, (list, tuple)):
            found = "null" if value is None else "a single value"
            raise RowRefused(f"Repeated field {path} must be a list, found {found}.", path)
        values: Sequence[Any] = value  # pyright: ignore[reportUnknownVariableType]
        if any(each is None for each in values):
            raise RowRefused(f"Repeated field {path} has a null in its list.", path)
        return [_single(each, column, path) for each in values]
    if value is None:
        if column["mode"] == "REQUIRED":
            raise RowRefused(f"Missing required field: {path}.", path)
        return None
    return _single(value, column, path)


def _single(value: Any, column: Field, path: str) -> Any:
    kind = column["type"]
    if kind == "RECORD":
        if not isinstance(value, Mapping):
            raise RowRefused(f"This field: {path} is not a record.", path)
        nested: Mapping[str, Any] = value  # pyright: ignore[reportUnknownVariableType]
        return checked_row(nested, column["fields"], f"{path}.")
    try:
        return _converted(value, kind)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise RowRefused(f"Cannot convert value to {kind.lower()}: {value!r} (field: {path})", path) from error


def _converted(value: Any, kind: str) -> Any:
    """Return what BigQuery stores for a value from JSON or Avro. Raises an error of Python if it can't."""
    if kind == "BOOLEAN":
        return value if isinstance(value, bool) else {"true": True, "false": False}[str(value).lower()]
    if isinstance(value, bool) and kind != "STRING":
        raise TypeError("a boolean")
    if kind == "INTEGER":
        if isinstance(value, float) and not value.is_integer():
            raise ValueError("a fraction")
        return int(value)
    if kind == "FLOAT":
        return float(value)
    if kind in ("NUMERIC", "BIGNUMERIC"):
        return Decimal(str(value))
    if kind == "BYTES":
        return value if isinstance(value, bytes) else base64.b64decode(str(value), validate=True)
    if kind == "TIMESTAMP":
        return _timestamp(value)
    if kind in _DATES:
        return value if isinstance(value, _DATES[kind]) else _DATES[kind].fromisoformat(value)
    return value if isinstance(value, str) else str(value)


def _timestamp(value: Any) -> datetime.datetime:
    if isinstance(value, (int, float)):
        return datetime.datetime.fromtimestamp(value, datetime.timezone.utc)
    if isinstance(value, str):
        value = datetime.datetime.fromisoformat(value.replace("Z", "+00:00").replace(" UTC", "+00:00"))
    return value if value.tzinfo else value.replace(tzinfo=datetime.timezone.utc)
