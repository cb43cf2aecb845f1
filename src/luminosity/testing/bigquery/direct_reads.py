"""The Storage Read API of a fake BigQuery: sessions, whose streams each bring a part of a table's rows."""

from __future__ import annotations

import importlib
import io
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import fastavro
import grpc
import pyarrow as pa

from luminosity.testing.bigquery.exports import avro_schema, avro_value
from luminosity.testing.bigquery.store import Key
from luminosity.testing.bigquery.tables import Field, Refused, Row, StoredTable

__all__ = ["DirectReads", "client_at"]

_SERVICE = "google.cloud.bigquery.storage.v1.BigQueryRead"
_TABLE = re.compile("projects/([^/]+)/datasets/([^/]+)/tables/([^/]+)")
_CALLS = 64  # at once; a stream holds one of them
_ROWS = 1_000  # of one response
_STATUSES = {"notFound": grpc.StatusCode.NOT_FOUND, "notImplemented": grpc.StatusCode.UNIMPLEMENTED}
_ARROW: dict[str, Callable[[], pa.DataType]] = {
    "STRING": pa.string,
    "GEOGRAPHY": pa.string,
    "BOOLEAN": pa.bool_,
    "BYTES": pa.binary,
    "FLOAT": pa.float64,
    "INTEGER": pa.int64,
    "NUMERIC": lambda: pa.decimal128(38, 9),
    "BIGNUMERIC": lambda: pa.decimal256(76, 38),
    "TIMESTAMP": lambda: pa.timestamp("us", "UTC"),
    "DATE": pa.date32,
    "TIME": lambda: pa.time64("us"),
    "DATETIME": lambda: pa.timestamp("us"),
}


class _Stream(NamedTuple):
    fields: list[Field]
    rows: list[Row]
    is_arrow: bool


class DirectReads:
    """A gRPC server on the loopback. ``find`` returns a copy of a table; threads of the server call it.

    A session has a stream for each ``rows_per_stream`` rows, but at most as many as it asks for.
    """

    def __init__(self, find: Callable[[Key], StoredTable], rows_per_stream: int) -> None:
        self._find = find
        self._rows_per_stream = rows_per_stream
        self._sessions = itertools.count(1)
        self._streams: dict[str, _Stream] = {}
        handlers = {
            "CreateReadSession": grpc.unary_unary_rpc_method_handler(
                self._create_session,
                request_deserializer=lambda data: _types().CreateReadSessionRequest.deserialize(data),
                response_serializer=lambda session: _types().ReadSession.serialize(session),
            ),
            "ReadRows": grpc.unary_stream_rpc_method_handler(
                self._read_rows,
                request_deserializer=lambda data: _types().ReadRowsRequest.deserialize(data),
                response_serializer=lambda response: _types().ReadRowsResponse.serialize(response),
            ),
        }
        self._server: Any = grpc.server(ThreadPoolExecutor(_CALLS, thread_name_prefix="fake-bigquery-reads"))
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
        self.host = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        """End the server and all calls. A second call does nothing."""
        self._server.stop(0).wait()

    def _create_session(self, request: Any, context: Any) -> Any:
        wanted = request.read_session
        try:
            if wanted.read_options.row_restriction:
                raise Refused("FakeBigQuery has no row_restriction: read all rows and filter them", "notImplemented")
            found = _TABLE.fullmatch(wanted.table)
            if found is None:
                raise Refused(f"Invalid table name: {wanted.table}")
            project, dataset, name = found.groups()
            table = self._find((project, dataset, name))
            fields = _selected(table.fields, list(wanted.read_options.selected_fields))
            is_arrow = wanted.data_format == _types().DataFormat.ARROW
            described = _arrow_session(fields) if is_arrow else _avro_session(fields)
        except Refused as error:
            context.abort(_STATUSES.get(error.reason, grpc.StatusCode.INVALID_ARGUMENT), error.message)
            raise AssertionError("abort raises") from error
        session = f"projects/{project}/locations/us/sessions/{next(self._sessions)}"
        streams = -(-len(table.rows) // self._rows_per_stream)
        streams = min(streams, request.max_stream_count or streams)
        names = [f"{session}/streams/{number}" for number in range(streams)]
        for number, each in enumerate(names):
            self._streams[each] = _Stream(fields, table.rows[number::streams], is_arrow)
        return _types().ReadSession(
            name=session,
            table=wanted.table,
            data_format=wanted.data_format,
            streams=[_types().ReadStream(name=each) for each in names],
            estimated_row_count=len(table.rows),
            **described,
        )

    def _read_rows(self, request: Any, context: Any) -> Iterator[Any]:
        stream = self._streams.get(request.read_stream)
        if stream is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"Not found: Stream {request.read_stream}")
            return
        session = _arrow_session(stream.fields) if stream.is_arrow else _avro_session(stream.fields)
        content_of = _arrow_rows if stream.is_arrow else _avro_rows
        names = [each["name"] for each in stream.fields]
        for begin in range(request.offset, len(stream.rows), _ROWS):
            rows = [{name: row[name] for name in names} for row in stream.rows[begin : begin + _ROWS]]
            yield _types().ReadRowsResponse(row_count=len(rows), **session, **content_of(stream.fields, rows))


def client_at(host: str) -> Any:
    """Return Google's client for reads from the fake at ``host``."""
    storage: Any = importlib.import_module("google.cloud.bigquery_storage_v1")
    transport: Any = importlib.import_module("google.cloud.bigquery_storage_v1.services.big_query_read.transports")
    # No proxy of the environment.
    channel = grpc.insecure_channel(host, [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", -1)])
    return storage.BigQueryReadClient(transport=transport.BigQueryReadGrpcTransport(channel=channel))


@cache
def _types() -> Any:
    """Return the messages. They exist wherever a client is that has called."""
    return importlib.import_module("google.cloud.bigquery_storage_v1.types")


def _selected(fields: list[Field], names: Sequence[str]) -> list[Field]:
    known = {each["name"] for each in fields}
    for name in names:
        if name not in known:
            raise Refused(f"The following selected fields do not exist in the table schema: {name}")
    return [each for each in fields if each["name"] in names] if names else fields


def _avro_session(fields: Sequence[Field]) -> dict[str, Any]:
    return {"avro_schema": {"schema": json.dumps(avro_schema(fields))}}


def _avro_rows(fields: Sequence[Field], rows: Sequence[Row]) -> dict[str, Any]:
    schema = fastavro.parse_schema(avro_schema(fields))
    content = io.BytesIO()
    for row in rows:
        fastavro.schemaless_writer(content, schema, avro_value(row))
    return {"avro_rows": {"serialized_binary_rows": content.getvalue()}}


def _arrow_session(fields: Sequence[Field]) -> dict[str, Any]:
    return {"arrow_schema": {"serialized_schema": _arrow_schema(fields).serialize().to_pybytes()}}


def _arrow_rows(fields: Sequence[Field], rows: Sequence[Row]) -> dict[str, Any]:
    batch = pa.RecordBatch.from_pylist(list(rows), _arrow_schema(fields))
    return {"arrow_record_batch": {"serialized_record_batch": batch.serialize().to_pybytes()}}


def _arrow_schema(fields: Sequence[Field]) -> pa.Schema:
    return pa.schema([_arrow_field(each) for each in fields])


def _arrow_field(field: Field) -> pa.Field:
    if field["type"] == "RECORD":
        kind: Any = pa.struct([_arrow_field(each) for each in field["fields"]])
    elif field["type"] in _ARROW:
        kind = _ARROW[field["type"]]()
    else:
        raise Refused(f"FakeBigQuery has no Arrow type for {field['type']} (field: {field['name']})")
    if field["mode"] == "REPEATED":
        return pa.field(field["name"], pa.list_(kind), nullable=False)
    return pa.field(field["name"], kind, nullable=field["mode"] != "REQUIRED")
