"""Write a table to BigQuery and read it back, with Beam's own sink and source::

    pip install 'apache-beam[gcp]'
    python examples/stores/bigquery.py --table=my-project:my_dataset.colours

Options that ``--help`` does not list go to Beam.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.options.pipeline_options import PipelineOptions
from colours import colours

from luminosity import RowsFromTable, TableFromRows

_TYPES = {pa.int64(): "INTEGER", pa.string(): "STRING", pa.float32(): "FLOAT", pa.bool_(): "BOOLEAN"}


def bigquery_schema(schema: Any) -> dict[str, Any]:
    """Return the columns as BigQuery describes them; vectors are repeated numbers.

    >>> bigquery_schema(pa.schema([("v", pa.list_(pa.float32(), 3))]))
    {'fields': [{'name': 'v', 'type': 'FLOAT', 'mode': 'REPEATED'}]}
    """
    fields: list[dict[str, str]] = []
    for field in schema:
        is_list = pa.types.is_list(field.type) or pa.types.is_fixed_size_list(field.type)
        kind = field.type.value_type if is_list else field.type
        fields.append({"name": field.name, "type": _TYPES[kind], "mode": "REPEATED" if is_list else "NULLABLE"})
    return {"fields": fields}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", required=True, help="project:dataset.table")
    known, others = parser.parse_known_args(argv)
    table = colours()

    with beam.Pipeline(options=PipelineOptions(others)) as pipeline:
        _ = (
            pipeline
            | beam.Create([table])
            | RowsFromTable()
            | beam.io.WriteToBigQuery(known.table, schema=bigquery_schema(table.schema), method="STREAMING_INSERTS")
        )

    with beam.Pipeline(options=PipelineOptions(others)) as pipeline:
        _ = (
            pipeline
            | beam.io.ReadFromBigQuery(table=known.table, method="DIRECT_READ")
            | TableFromRows(table.schema)
            | beam.Map(print_names)
        )


def print_names(batch: Any) -> None:
    for row in batch.to_pylist():
        print(row["name"], [round(part, 2) for part in row["embedding"]])


if __name__ == "__main__":
    main()
