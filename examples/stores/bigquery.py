"""Write a table to BigQuery with Beam's own sink, by load jobs or streaming inserts::

    pip install luminosity 'apache-beam[gcp]'
    lum run examples/stores/bigquery.py
    lum run examples/stores/bigquery.py --table=my-project:my_dataset.colours --temp_location=gs://my-bucket/temp

Without ``--table``, a BigQuery inside this process takes the rows: nothing leaves the machine, and you see the jobs.
With ``--table``, the table is also read back. Options that ``--help`` does not list go to Beam.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from colours import colours

from luminosity import RowsFromTable, TableFromRows, bigquery_schema
from luminosity.testing import FakeBigQuery


def write(table: str, method: str, beam_args: Sequence[str], **settings: Any) -> None:
    batch = colours()
    with beam.Pipeline(options=PipelineOptions(beam_args)) as pipeline:
        _ = (
            pipeline
            | beam.Create([batch])
            | RowsFromTable()
            | beam.io.WriteToBigQuery(table, schema=bigquery_schema(batch.schema), method=method, **settings)
        )


def read(table: str, method: str, beam_args: Sequence[str]) -> None:
    with beam.Pipeline(options=PipelineOptions(beam_args)) as pipeline:
        _ = (
            pipeline
            | beam.io.ReadFromBigQuery(table=table, method=method)
            | TableFromRows(colours().schema)
            | beam.Map(lambda batch: show(batch.to_pylist()))
        )


def write_to_fake(method: str, beam_args: Sequence[str]) -> None:
    with FakeBigQuery() as bigquery, tempfile.TemporaryDirectory() as folder:
        write(
            "project:dataset.colours",
            method,
            beam_args,
            custom_gcs_temp_location=folder,  # in place of gs://…, which validate=False allows
            validate=False,
        )
        for job in bigquery.jobs:
            load = job["configuration"]["load"]
            rows = job["statistics"]["load"]["outputRows"]
            files = len(load["sourceUris"])
            print(f"load job: {rows} rows, {files} files in {load['sourceFormat']}, {load['writeDisposition']}")
        show(bigquery.rows("dataset.colours"))


def show(rows: Iterable[Mapping[str, Any]]) -> None:
    for row in rows:
        print(row["name"], [round(part, 2) for part in row["embedding"]])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", help="project:dataset.table; by default a BigQuery inside this process")
    parser.add_argument(
        "--method", choices=["FILE_LOADS", "STREAMING_INSERTS"], default="FILE_LOADS", help="how to write"
    )
    parser.add_argument("--read", choices=["DIRECT_READ", "EXPORT"], default="DIRECT_READ", help="how to read it back")
    known, beam_args = parser.parse_known_args(argv)
    if known.table is None:
        write_to_fake(known.method, beam_args)
    else:
        write(known.table, known.method, beam_args)
        read(known.table, known.read, beam_args)


if __name__ == "__main__":
    main()
