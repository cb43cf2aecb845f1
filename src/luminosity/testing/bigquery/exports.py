"""The files that extract jobs write: Avro, or lines of JSON, with the types that BigQuery gives them."""

from __future__ import annotations

import base64
import datetime
import io
import json
import math
from collections.abc import Sequence
from typing import Any

import fastavro
from apache_beam.io.filesystem import CompressionTypes
from apache_beam.io.filesystems import FileSystems
from fastavro.schema import SchemaParseException

from luminosity.testing.bigquery.tables import Field, Refused, Row

__all__ = ["avro_schema", "avro_value", "write_files"]

_DIGITS = 12  # of the number that BigQuery puts in place of the star
_AVRO: dict[str, Any] = {
    "STRING": "string",
    "GEOGRAPHY": "string",
    "BOOLEAN": "boolean",
    "BYTES": "bytes",
    "FLOAT": "double",
    "INTEGER": "long",
    "NUMERIC": {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 9},
    "BIGNUMERIC": {"type": "bytes", "logicalType": "decimal", "precision": 77, "scale": 38},
    "TIMESTAMP": {"type": "long", "logicalType": "timestamp-micros"},
    "DATE": {"type": "int", "logicalType": "date"},
    "TIME": {"type": "long", "logicalType": "time-micros"},
    "DATETIME": {"type": "string", "logicalType": "datetime"},
}


def write_files(fields: Sequence[Field], rows: Sequence[Row], extract: dict[str, Any], rows_per_file: int) -> list[int]:
    """Write the files of an extract job, and return how many each of its addresses got.

    An address with a star gets files of ``rows_per_file`` rows; one without gets all rows in one file.
    """
    compression = extract.get("compression") or "NONE"
    if compression != "NONE":
        raise Refused(f"FakeBigQuery exports files without compression, found {compression}")
    (uri, *more) = extract["destinationUris"]
    if more or uri.count("*") > 1:
        raise Refused(f"FakeBigQuery exports to one address with at most one star, found {extract['destinationUris']}")
    size = rows_per_file if "*" in uri else max(len(rows), 1)
    contents = [_content(fields, rows[i : i + size], extract) for i in range(0, max(len(rows), 1), size)]
    for number, content in enumerate(contents):
        path = uri.replace("*", f"{number:0{_DIGITS}}")
        try:
            with FileSystems.create(path, compression_type=CompressionTypes.UNCOMPRESSED) as file:
                file.write(content)
        except OSError as error:
            raise Refused(f"Access Denied: File {path}: {error}", "accessDenied") from error
    return [len(contents)]


def avro_schema(fields: Sequence[Field], path: str = "") -> dict[str, Any]:
    """Return the Avro schema that BigQuery has for columns.

    >>> avro_schema([{"name": "id", "type": "INTEGER", "mode": "REQUIRED"}])
    {'type': 'record', 'name': 'Root', 'fields': [{'name': 'id', 'type': 'long'}]}
    """
    columns: list[dict[str, Any]] = []
    for each in fields:
        if each["type"] == "RECORD":
            kind = {**avro_schema(each["fields"], f"{path or 'root'}.{each['name']}"), "name": each["name"].title()}
        elif each["type"] in _AVRO:
            kind = _AVRO[each["type"]]
        else:
            raise Refused(f"FakeBigQuery has no Avro type for {each['type']} (field: {each['name']})")
        if each["mode"] == "REPEATED":
            kind = {"type": "array", "items": kind}
        columns.append({"name": each["name"], "type": ["null", kind] if each["mode"] == "NULLABLE" else kind})
    named = {"namespace": path} if path else {}
    return {"type": "record", "name": "Root", **named, "fields": columns}


def avro_value(value: Any) -> Any:
    """Return a value as fastavro takes it: a time without a zone is a text in BigQuery's files."""
    if isinstance(value, dict):
        record: Row = value  # pyright: ignore[reportUnknownVariableType]
        return {name: avro_value(each) for name, each in record.items()}
    if isinstance(value, list):
        return [avro_value(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, datetime.datetime) and value.tzinfo is None:
        return value.isoformat()
    return value


def _content(fields: Sequence[Field], rows: Sequence[Row], extract: dict[str, Any]) -> bytes:
    kind = extract.get("destinationFormat") or "CSV"
    if kind == "NEWLINE_DELIMITED_JSON":
        return b"".join(json.dumps(_json_value(row)).encode() + b"\n" for row in rows)
    if kind != "AVRO":
        raise Refused(f"FakeBigQuery exports AVRO and NEWLINE_DELIMITED_JSON, found {kind}")
    if not extract.get("useAvroLogicalTypes"):
        raise Refused("FakeBigQuery exports AVRO with useAvroLogicalTypes, found none")
    file = io.BytesIO()
    try:
        fastavro.writer(file, avro_schema(fields), [avro_value(row) for row in rows])
    except (ValueError, SchemaParseException) as error:
        raise Refused(f"Error while exporting data: {error}") from error
    return file.getvalue()


def _json_value(value: Any) -> Any:
    """Return what BigQuery's files have for a value. Rows leave nulls out.

    >>> _json_value({"id": 7, "share": 0.5, "text": None, "raw": b"a"})
    {'id': '7', 'share': 0.5, 'raw': 'YQ=='}
    """
    if isinstance(value, dict):
        record: Row = value  # pyright: ignore[reportUnknownVariableType]
        return {name: _json_value(each) for name, each in record.items() if each is not None}
    if isinstance(value, list):
        return [_json_value(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime.datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S.%f UTC") if value.tzinfo else value.isoformat()
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if isinstance(value, (bool, str)) else str(value)
