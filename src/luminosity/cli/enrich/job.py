"""The pipeline that ``lum enrich`` runs."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
import pyarrow as pa
import urllib3
from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions

from luminosity import Enrich, LuminosityOptions, LuminosityRunner, MapTable, ReadTable, WriteQdrant, WriteTable
from luminosity.cli.enrich.columns import ColumnRequest, check, near
from luminosity.cli.enrich.report import print_report
from luminosity.engine.resources.machine import Machine
from luminosity.errors import OptionError
from luminosity.extras import require
from luminosity.io.writing.destination import Destination
from luminosity.io.writing.schema_checks import check_writable

__all__ = ["Job", "run"]

_ADDED = {"embed": pa.list_(pa.float32()), "classify": pa.struct({"label": pa.string(), "score": pa.float32()})}
"""By option, about: handlers say more. What one's own handler adds is known when it has run."""
_TEXTS = (pa.string(), pa.large_string(), pa.string_view(), pa.null())
_ANSWER_S = 10.0
_ROW_ID = "id"


@dataclass(frozen=True)
class Job:
    """The command line, checked against the table that it names."""

    reading: ReadTable  # which has looked at the table: once is enough
    out: str
    asked: Sequence[ColumnRequest]
    rows: int | None
    show: int | None
    if_exists: Any
    dead_letters: str | None
    vector_store: str | None
    collection: str
    id: str | None  # None: a hash of the row

    @classmethod
    def of(cls, parsed: argparse.Namespace, asked: Sequence[ColumnRequest]) -> Job:
        columns = [name.strip() for name in (parsed.columns or "").split(",") if name.strip()] or None
        reading = ReadTable(parsed.table, columns)
        there = list(reading.schema.names)
        check(asked, there)
        _check_texts(asked, reading.schema)
        _check_files(parsed, asked, reading.schema)
        if parsed.vector_store and not any(each.is_vector for each in asked):
            raise OptionError("--vector-store needs a vector to keep: add one with --embed COLUMN=MODEL")
        if parsed.vector_store:
            _check_answers(parsed.vector_store)
        if parsed.dead_letters and os.path.normpath(parsed.dead_letters) == os.path.normpath(parsed.out):
            raise OptionError(f"--dead-letters {parsed.dead_letters}: that is OUT; such rows need a table of their own")
        if parsed.id and parsed.id not in there:
            raise OptionError(f"--id {parsed.id}: there is no such column; {near(parsed.id, there)}")
        return cls(
            reading=reading,
            out=parsed.out,
            asked=asked,
            rows=parsed.rows,
            show=parsed.show,
            if_exists=parsed.if_exists,
            dead_letters=parsed.dead_letters,
            vector_store=parsed.vector_store,
            collection=parsed.collection or _stem(parsed.table),
            id=parsed.id or (_ROW_ID if _ROW_ID in there else None),
        )


def _check_texts(asked: Sequence[ColumnRequest], schema: pa.Schema) -> None:
    """A worker would load the model first. What another model adds is known when it runs."""
    for each in asked:
        column = each.inputs[0]
        if each.option not in _ADDED or column not in schema.names:
            continue
        kind = schema.field(column).type
        held = kind.value_type if pa.types.is_dictionary(kind) else kind
        if held not in _TEXTS:
            raise OptionError(
                f"--{each.option} {column}={each.model}: the column {column!r} holds {kind}, expected texts"
            )


def _check_files(parsed: argparse.Namespace, asked: Sequence[ColumnRequest], schema: pa.Schema) -> None:
    """Whether files take what they get: models may work for long before the first row is written."""
    added = [pa.field(each.name, _ADDED[each.option]) for each in asked if each.option in _ADDED]
    check_writable(_target(parsed.out, parsed.if_exists), pa.schema([*schema, *added]))
    if parsed.dead_letters:
        check_writable(_target(parsed.dead_letters, parsed.if_exists), schema)


def _target(path: str, if_exists: str) -> Destination:
    try:
        return Destination.of(path, if_exists=if_exists)
    except ValueError as error:
        raise OptionError(str(error).partition(" and say compression=")[0]) from None


def _check_answers(store: str) -> None:
    """A worker would ask a server that is not there for minutes, and miss what is not installed after the models."""
    is_server = store.startswith(("http://", "https://"))
    require("qdrant_client" if is_server else "qdrant_edge", "qdrant")
    if not is_server:
        return
    try:
        urllib3.request("GET", store, timeout=_ANSWER_S, retries=False)
    except urllib3.exceptions.HTTPError as error:
        raise OptionError(
            f"--vector-store {store}: no server answers there ({error}). Is it up? A folder's name needs no server"
        ) from None


def run(job: Job, flags: Sequence[str]) -> int:
    options = PipelineOptions(flags)
    runner = options.view_as(StandardOptions).runner or LuminosityRunner()
    pipeline = beam.Pipeline(runner=runner, options=options)
    _build(pipeline, job, _hints(options))
    began = time.monotonic()
    result = pipeline.run()
    result.wait_until_finish()
    print_report(job, result.metrics(), time.monotonic() - began)
    return 0


def _build(pipeline: beam.Pipeline, job: Job, hints: Mapping[str, str]) -> None:
    if job.rows is None:
        table = pipeline | "Read" >> job.reading
    else:
        table = pipeline | "First" >> beam.Create(job.reading.first(job.rows)).with_output_types(pa.RecordBatch)
    models = Enrich(**{each.name: each.column() for each in job.asked}).with_resource_hints(**hints)
    if job.dead_letters is None:
        good = table | "Enrich" >> models
    else:
        good, bad = table | "Enrich" >> models.with_exception_handling()
        _ = bad | "DeadLetters" >> WriteTable(job.dead_letters, if_exists=job.if_exists)
    _ = good | "Write" >> WriteTable(job.out, if_exists=job.if_exists)
    if job.vector_store is not None:
        vectors = {each.name: each.name for each in job.asked if each.is_vector}
        if job.id is None:
            good |= "Ids" >> MapTable(with_row_ids, made={each.name for each in job.asked})
        _ = good | "Store" >> WriteQdrant(job.vector_store, job.collection, vectors=vectors, id=job.id or _ROW_ID)


def with_row_ids(batch: Any, made: set[str]) -> Any:
    """A column with an id for each row: the same for the same row, whatever models say of it.

    >>> rows = pa.record_batch({"text": ["a", "b", "a"], "score": [1.0, 2.0, 3.0]})
    >>> ids = with_row_ids(rows, {"score"})["id"].to_pylist()
    >>> ids[0] == ids[2] != ids[1]
    True
    """
    own = batch.select([name for name in batch.schema.names if name not in made])
    return batch.append_column(_ROW_ID, pa.array([_row_id(row) for row in own.to_pylist()], pa.string()))


def _row_id(row: dict[str, Any]) -> str:
    content = json.dumps(row, sort_keys=True, default=str).encode()
    return str(uuid.UUID(bytes=hashlib.blake2b(content, digest_size=16).digest()))


def _hints(options: PipelineOptions) -> dict[str, str]:
    """Models get an accelerator where there is one."""
    declared = options.view_as(LuminosityOptions).accelerators
    devices = Machine.detect(int(declared) if str(declared).isdigit() else None).devices
    return {"accelerator": "count:1"} if devices else {}


def _stem(table: str) -> str:
    """
    >>> _stem("data/reviews-*.jsonl.gz"), _stem("gs://bucket/reviews/"), _stem("*.csv")
    ('reviews', 'reviews', 'rows')
    """
    name = os.path.basename(table.rstrip("/")).partition(".")[0]
    return name.partition("*")[0].strip("-_ ") or "rows"
