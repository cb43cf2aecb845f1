"""Find out what files are by their content, with a real ONNX model that is inside a Python package.

::

    lum run examples/onnx/pipeline.py
    lum run examples/onnx/pipeline.py ~/Downloads/* --out=kinds

Beam's handler for ONNX runs the model twice: over elements with ``RunInference``, and over a table's column with
``Enrich``. Both give the same scores. It is plain Beam and runs on any runner. Options that ``--help`` does not list go
to Beam.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from apache_beam.ml.inference.base import KeyedModelHandler
from apache_beam.ml.inference.onnx_inference import OnnxModelHandlerNumpy
from apache_beam.options.pipeline_options import PipelineOptions
from file_kinds import KINDS, MODEL, WIDTH, features_of

from luminosity import Column, Enrich, MapTable, RunInference, WriteTable

RecordBatch = Any  # a pyarrow.RecordBatch; pyarrow has no type annotations


def onnx_model() -> OnnxModelHandlerNumpy:
    """Return Beam's handler for the model."""
    return OnnxModelHandlerNumpy(str(MODEL), providers=["CPUExecutionProvider"])


def print_kinds(paths: Sequence[Path], beam_args: Sequence[str]) -> None:
    """Print what each file is. An element is a pair of the file's name and the numbers that the model takes."""
    with beam.Pipeline(options=PipelineOptions(list(beam_args))) as pipeline:
        _ = (
            pipeline
            | beam.Create([str(path) for path in paths])
            | "Features" >> beam.Map(lambda path: (path, features_of(Path(path).read_bytes())))
            | RunInference(KeyedModelHandler(onnx_model()))
            | "Print" >> beam.MapTuple(lambda path, result: print(f"file   {_line(path, result.inference)}"))
        )


def _line(path: str, scores: Any) -> str:
    best = int(np.argmax(scores))
    return f"{Path(path).name}: {KINDS[best]} ({scores[best]:.2f})"


def add_features(table: RecordBatch) -> RecordBatch:
    """Add the column ``features`` to a table whose column ``content`` holds files."""
    contents = table["content"].to_pylist()
    numbers = np.concatenate([features_of(content) for content in contents])
    return table.append_column("features", pa.FixedSizeListArray.from_arrays(pa.array(numbers), WIDTH))


def name_kinds(table: RecordBatch) -> RecordBatch:
    """Replace the scores of all kinds by the best one, and drop what is no longer needed."""
    scores = np.stack(table["scores"].to_numpy(zero_copy_only=False))
    kinds = pa.array([KINDS[best] for best in scores.argmax(axis=1)], pa.string())
    return pa.RecordBatch.from_arrays(
        [table["name"], kinds, pa.array(scores.max(axis=1)), table["scores"]], names=["name", "kind", "score", "scores"]
    )


def write_kinds(paths: Sequence[Path], out: Path, beam_args: Sequence[str]) -> None:
    """Write a table with the kind of each file."""
    content = pa.array([path.read_bytes() for path in paths], pa.binary())
    table = pa.record_batch({"name": [path.name for path in paths], "content": content})
    with beam.Pipeline(options=PipelineOptions(list(beam_args))) as pipeline:
        _ = (
            pipeline
            | beam.Create([table])
            | MapTable(add_features)
            | Enrich(scores=Column(onnx_model(), "features", pa.list_(pa.float32(), len(KINDS))))
            | MapTable(name_kinds)
            | WriteTable(out)
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Find out what files are: the files of the examples, if none are named."""
    parser = argparse.ArgumentParser(description="Find out what files are.", allow_abbrev=False)
    parser.add_argument("files", nargs="*", type=Path, help="files (default: the files of this and other examples)")
    parser.add_argument("--out", type=Path, help="folder for the table")
    arguments, beam_args = parser.parse_known_args(sys.argv[1:] if argv is None else argv)

    examples = Path(__file__).parent.parent
    named = [path for path in arguments.files if path.is_file()]
    paths = named or sorted(path for path in examples.glob("*/*.*") if path.suffix in (".md", ".py"))[:12]
    out = arguments.out or Path(tempfile.mkdtemp(prefix="kinds-")) / "table"
    print_kinds(paths, beam_args)
    write_kinds(paths, out, beam_args)
    rows = pq.read_table(out).select(["name", "kind", "score"]).to_pylist()
    for row in rows:
        print(f"table  {row['name']}: {row['kind']} ({row['score']:.2f})")
    print(f"table of {len(rows)} files in {out}")


if __name__ == "__main__":
    main()
