"""The pipeline that ``lum enrich`` runs, and the checks before it runs."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.io.filesystems import FileSystems
from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions
from apache_beam.runners.runner import PipelineState

from luminosity import AddRowIds, Enrich, LuminosityOptions, LuminosityRunner, ReadTable, WriteTable, WriteVectors
from luminosity.cli.common.table_options import csv_arguments, tell_doubts
from luminosity.cli.enrich.columns import ColumnRequest, check_requests, no_column
from luminosity.cli.enrich.resume import Command, ResumableRun, checkpointed, find_run, places, rows_of
from luminosity.cli.enrich.shown import Report, RowProgress, print_report
from luminosity.errors import OptionError, RunFailed
from luminosity.io.lakes.by_name import is_name, place_of
from luminosity.io.reading.file_rows import BYTES, FILE_COLUMNS
from luminosity.io.reading.readers import RowCount
from luminosity.io.reading.text_lines import LETTERS
from luminosity.io.stores.kinds import kind_of
from luminosity.runs.views.choice import is_live

__all__ = ["Job", "advise", "run"]

_ROW_ID = "id"
_MODEL = "_model"  # the column of dead letters that Enrich adds


@dataclass(frozen=True)
class Job:
    """The command line, checked against the table that it names. Nothing has been written yet."""

    reading: ReadTable
    models: Enrich
    writing: WriteTable
    allow_empty: bool
    out: str
    requests: Sequence[ColumnRequest]
    table: str
    rows: int | None
    show: int | None
    writing_dead_letters: WriteTable | None
    dead_letters: str | None
    writing_store: WriteVectors | None
    id: str | None  # None: a hash of the row
    kept: ResumableRun | None  # None: the run has no checkpoint of this command

    @classmethod
    def of(cls, parsed: argparse.Namespace, requests: Sequence[ColumnRequest], flags: Sequence[str]) -> Job:
        """Check the options and make the transforms; models are not loaded. ``flags`` are the runner's."""
        columns = [name.strip() for name in (parsed.columns or "").split(",") if name.strip()] or None
        [csv] = csv_arguments(parsed, parsed.table)
        reading = ReadTable(parsed.table, columns, **csv)
        if reading.has_files:
            if columns is None and any(BYTES in each.inputs for each in requests):
                reading = ReadTable(parsed.table, FILE_COLUMNS.names, **csv)
            parsed.dead_letters = parsed.dead_letters or _letters_beside(parsed.out)
        tell_doubts("enrich", reading)
        if parsed.dead_letters and reading.has_lines:
            reading.with_exception_handling()
        existing = list(reading.schema.names)
        check_requests(requests, existing)
        models = Enrich(**{each.name: each.column(parsed.nulls) for each in requests})
        models.check(reading.schema)
        if parsed.dead_letters:
            _check_apart(parsed.dead_letters, parsed.out)
        _check_keeps_input(parsed)
        if parsed.id and parsed.id not in existing:
            raise no_column(f"--id {parsed.id}", parsed.id, existing)
        kept = _kept_run(parsed, requests, reading, flags)
        is_resumed = kept is not None and kept.is_resumed
        writing, writing_dead_letters = _outputs(parsed, requests, reading, is_resumed=is_resumed)
        row_id = parsed.id or (_ROW_ID if _ROW_ID in existing else None)
        return cls(
            reading=reading,
            models=models,
            writing=writing,
            allow_empty=parsed.allow_empty,
            out=parsed.out,
            requests=requests,
            table=parsed.table,
            rows=parsed.rows,
            show=parsed.show,
            writing_dead_letters=writing_dead_letters,
            dead_letters=parsed.dead_letters,
            writing_store=_store(parsed, requests, row_id) if parsed.vector_store else None,
            kept=kept,
            id=row_id,
        )

    def count(self) -> RowCount | None:
        """Return how many rows there are to process, or None if it can't be told."""
        total = self.reading.count()
        if total is not None and self.rows is not None:
            return total._replace(rows=min(total.rows, self.rows))
        return total

    def report(self) -> Report:
        """Return what the report at the end names."""
        stored = ""
        if self.writing_store is not None:
            store = self.writing_store.address
            stored = f"in {f'collection {store.collection} of ' if store.collection else ''}{store.where}"
        return Report([each.name for each in self.requests], self.out, self.dead_letters, stored, self.show)


def run(job: Job, flags: Sequence[str]) -> int:
    """Run the pipeline, print what it did, and return the exit code; ``flags`` are the runner's.

    Raises :class:`RunFailed` if the run was stopped, or if no row is written.
    """
    began = time.monotonic()
    if job.show is not None and any(each.option == "prompt" for each in job.requests):
        flags = [*flags, f"--show_prompts={job.show}"]
    options = PipelineOptions(flags)
    with contextlib.ExitStack() as stack:
        if job.kept is not None:
            stack.enter_context(checkpointed(job.kept, options, job.count()))
        runner = options.view_as(StandardOptions).runner or LuminosityRunner(on_event=_progress(job, options))
        pipeline = beam.Pipeline(runner=runner, options=options)
        _build(pipeline, job)
        result = pipeline.run()
        result.wait_until_finish()
        if result.state in (PipelineState.STOPPED, PipelineState.CANCELLED):
            raise RunFailed("the run was stopped before the table was complete")
    if job.kept is not None:
        job.kept.remove()
        _remove_leftovers(job)
    written = print_report(job.report(), result.metrics(), time.monotonic() - began)
    if not written and not job.allow_empty:
        raise _no_rows(job)
    return 0


def advise(job: Job) -> str:
    """Return how to continue a run that has not finished, in words; empty if there is nothing to continue from.

    Removes what it has left in that case.
    """
    if job.kept is None or not job.kept.is_begun:
        return ""
    rows = job.kept.rows_saved()
    if rows:
        return f"{rows_of(rows, job.count())} are done and kept; repeat the command with --resume to continue"
    job.kept.remove()
    _remove_leftovers(job)
    return ""


def _remove_leftovers(job: Job) -> None:
    """Remove temporary files of runs that can't be continued any more, since their checkpoints are gone."""
    for writing in (job.writing, job.writing_dead_letters):
        if writing is not None:
            writing.remove_leftovers()


def _kept_run(
    parsed: argparse.Namespace, requests: Sequence[ColumnRequest], reading: ReadTable, flags: Sequence[str]
) -> ResumableRun | None:
    """Return the run as one that can be continued; None if the options exclude that."""
    options = PipelineOptions(flags)
    ours = options.view_as(LuminosityOptions)
    given = {
        "--checkpoint_dir": ours.checkpoint_dir,
        "--debug": ours.debug,
        "--no-checkpoint": not parsed.checkpoint,
        "--restart": ours.restart,
        "--runner": options.view_as(StandardOptions).runner,
    }
    excluding = [name for name, value in given.items() if value]
    if parsed.resume and excluding:
        why = ": a run with a checkpoint folder of its own continues by itself" if ours.checkpoint_dir else ""
        raise OptionError(
            f"--resume and {excluding[0]}: expected only one of them{why}", fix=f"leave out {excluding[0]}"
        )
    roots = places(parsed.out, ours.spill_dir)
    if excluding or not roots:
        return None
    return find_run(Command.of(parsed, requests, reading.files), roots, resume=parsed.resume)


def _progress(job: Job, options: PipelineOptions) -> RowProgress | None:
    """Return what shows the rows of this run instead of the runner's view, which shows stages."""
    ours = options.view_as(LuminosityOptions)
    if ours.progress not in ("auto", "plain"):
        return None  # off, or wrong, which the runner says
    shown = RowProgress(len(job.requests), job.count(), is_line=is_live(ours.progress))
    ours.progress = "off"
    return shown


def _letters_beside(out: str) -> str:
    """Return where dead letters go if files are rows: of thousands of files, some are damaged.

    >>> _letters_beside("out/"), _letters_beside("gs://bucket/v1.0/out.parquet")
    ('out-dead-letters', 'gs://bucket/v1.0/out-dead-letters.parquet')
    >>> _letters_beside("iceberg:main.shop.photos"), _letters_beside("delta:out/photos.v1")
    ('iceberg:main.shop.photos_dead_letters', 'delta:out/photos.v1-dead-letters')
    """
    if is_name(out):
        return f"{out}_dead_letters" if out.startswith("iceberg:") else f"{out.rstrip('/')}-dead-letters"
    folder, name = os.path.split(out.rstrip("/"))
    stem, dot, suffixes = name.partition(".")
    return os.path.join(folder, f"{stem}-dead-letters{dot}{suffixes}")


def _check_apart(dead_letters: str, out: str) -> None:
    """Refuse dead letters in the folder of OUT, or OUT in theirs: the next run could not replace either of them."""
    inner, outer = (os.path.abspath(place_of(path)) for path in (dead_letters, out))
    if inner == outer:
        raise OptionError(f"--dead-letters {dead_letters}: found OUT, expected another table")
    is_one_system = FileSystems.get_scheme(dead_letters) == FileSystems.get_scheme(out)
    if is_one_system and os.path.commonpath([inner, outer]) in (inner, outer):
        raise OptionError(
            f"--dead-letters {dead_letters}: found one table inside the other, expected two separate paths",
            fix="put the dead letters beside OUT, not into its folder or above it",
        )


def _check_keeps_input(parsed: argparse.Namespace) -> None:
    """Refuse to replace IN by some of its rows or columns: the others would be lost."""
    table = os.path.abspath(parsed.table)
    if parsed.if_exists != "replace" or os.path.abspath(parsed.out) not in (table, os.path.dirname(table)):
        return
    if option := "--rows" if parsed.rows is not None else "--columns" if parsed.columns else "":
        raise OptionError(
            f"OUT would replace IN, and {option} leaves a part of it out, which would be lost",
            fix="choose another OUT",
        )


def _no_rows(job: Job) -> RunFailed:
    """Return the error for a run that wrote no row: a table without rows is rarely what the user wants."""
    is_there = os.path.exists(job.out) if FileSystems.get_scheme(job.out) is None else FileSystems.exists(job.out)
    old = f"; {job.out} is as it was before" if is_there else ""
    letters = f", or look at {job.dead_letters} for the reason" if job.dead_letters else ""
    return RunFailed(
        f"no row was written to {job.out}{old}",
        fix=f"check {job.table}{letters}; add --allow-empty if the table may be empty",
    )


def _outputs(
    parsed: argparse.Namespace, requests: Sequence[ColumnRequest], reading: ReadTable, *, is_resumed: bool
) -> tuple[WriteTable, WriteTable | None]:
    """Make the writing transforms, and check them now: models may run for long before the first row is written.

    The first start of a run that is resumed has checked them, and may have published its files since.
    """
    added = [pa.field(each.name, kind) for each in requests if (kind := each.output) is not None]
    whole = pa.schema([*reading.schema, *added])
    if parsed.allow_empty:
        is_known = len(added) == len(requests)
        writing = WriteTable(parsed.out, if_exists=parsed.if_exists, allow_empty=whole if is_known else True)
    else:
        # An error inside the run could end it before the dead letters are written, which tell why there is no row.
        writing = WriteTable(parsed.out, if_exists=parsed.if_exists).keep_if_empty()
    if not is_resumed:
        writing.check(whole)
    if not parsed.dead_letters:
        return writing, None
    # No dead letters are a good result: those of an earlier run must go.
    dead_letters = WriteTable(parsed.dead_letters, if_exists=parsed.if_exists, allow_empty=True)
    if not is_resumed:
        dead_letters.check(_letters_schema(reading))
    return writing, dead_letters


def _store(parsed: argparse.Namespace, requests: Sequence[ColumnRequest], row_id: str | None) -> WriteVectors:
    vectors = {each.name: each.name for each in requests if each.is_vector}
    if not vectors:
        raise OptionError("--vector-store: found no vectors to keep", fix="add some with --embed COLUMN=MODEL")
    kind = kind_of(parsed.vector_store)
    collection = kind.address(parsed.vector_store, parsed.collection).collection
    if kind.has_collections and not collection:
        collection = _stem(parsed.table)
    store = WriteVectors(parsed.vector_store, collection or None, vectors=vectors, id=row_id or _ROW_ID)
    store.check_reachable()
    store.check_writable()
    return store


def _letters_schema(reading: ReadTable) -> pa.Schema:
    """Return the columns of dead letters: of rows that a model fails on, and of lines that can't be read."""
    own = [field for field in reading.schema if field.name not in (_MODEL, *LETTERS.names)]
    return pa.schema([*own, pa.field(_MODEL, pa.string()), *LETTERS]) if reading.has_lines else pa.schema(own)


def _build(pipeline: beam.Pipeline, job: Job) -> None:
    table, unreadable = _read(pipeline, job)
    if job.writing_dead_letters is None:
        good = table | "Enrich" >> job.models
    else:
        good, bad = table | "Enrich" >> job.models.with_exception_handling()
        if unreadable is not None:
            schema = _letters_schema(job.reading)
            both = (bad, unreadable) | "AllLetters" >> beam.Flatten()
            bad = both | "SameColumns" >> beam.Map(_with_columns, schema).with_output_types(pa.RecordBatch)
        _ = bad | "DeadLetters" >> job.writing_dead_letters
    _ = good | "Write" >> job.writing
    if job.writing_store is not None:
        if job.id is None:
            good |= "Ids" >> AddRowIds(_ROW_ID, columns=job.reading.schema.names)
        _ = good | "Store" >> job.writing_store


def _read(pipeline: beam.Pipeline, job: Job) -> tuple[Any, Any]:
    """Return the table, and the lines that can't be read, or None if there can't be any."""
    keeps_unreadable = job.writing_dead_letters is not None and job.reading.has_lines
    if job.rows is None:
        table = pipeline | "Read" >> job.reading
        return table if keeps_unreadable else (table, None)
    rows, letters = job.reading.first_with_letters(job.rows)
    table = pipeline | "First" >> beam.Create(rows).with_output_types(pa.RecordBatch)
    if not keeps_unreadable:
        return table, None
    return table, pipeline | "FirstUnreadable" >> beam.Create(letters).with_output_types(pa.RecordBatch)


def _with_columns(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the batch with these columns; those that it lacks are null."""
    columns = [
        batch.column(field.name) if field.name in batch.schema.names else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _stem(table: str) -> str:
    """Return the default name of a collection: the table's name without folders, suffixes and wildcards.

    >>> _stem("data/reviews-*.jsonl.gz"), _stem("gs://bucket/reviews/"), _stem("*.csv")
    ('reviews', 'reviews', 'rows')
    """
    name = os.path.basename(table.rstrip("/")).partition(".")[0]
    return name.partition("*")[0].strip("-_ ") or "rows"
