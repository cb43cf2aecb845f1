"""Follows a table into another one, with a commit for each batch or some, until the run is ended or killed.

It runs as ``python -m tests.io.lakes.following KIND FOLDER``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import apache_beam as beam
import pyarrow as pa
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms.trigger import AccumulationMode, AfterCount, Repeatedly
from apache_beam.transforms.window import GlobalWindows

from luminosity import LuminosityRunner
from luminosity.io.lakes.write import WriteLake
from tests.io.lakes.places import PLACES
from tests.marks import note

POLL_S = 0.2


def _note_worker(batch: pa.RecordBatch, at_work: str) -> pa.RecordBatch:
    note(at_work, os.getpid())
    return batch


def _main(kind: str, folder: Path) -> None:
    source, copy = PLACES[kind](folder / "source"), PLACES[kind](folder / "copy")
    options = PipelineOptions(
        ["--streaming", f"--checkpoint_dir={folder}/checkpoint", "--progress=off", "--cpu_workers=2"]
    )
    with beam.Pipeline(LuminosityRunner(), options) as pipeline:
        rows = pipeline | source.read(poll_s=POLL_S)
        noted = rows | beam.Map(_note_worker, f"{folder}/at_work").with_output_types(pa.RecordBatch)
        write = WriteLake(copy.lake, schema=pa.schema({"n": pa.int64()}))
        at_once = beam.WindowInto(
            GlobalWindows(), trigger=Repeatedly(AfterCount(1)), accumulation_mode=AccumulationMode.DISCARDING
        )
        _ = noted | at_once | write


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]))
