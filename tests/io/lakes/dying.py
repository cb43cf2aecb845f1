"""A stream into a lake whose run is killed at chosen commits: just before one, and just after another.

It runs as ``python -m tests.io.lakes.dying KIND FOLDER``, again and again until it ends by itself.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import apache_beam as beam
import pyarrow as pa
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms.periodicsequence import PeriodicImpulse
from apache_beam.transforms.window import FixedWindows

from luminosity import LuminosityRunner
from luminosity.io.lakes.contract import CommitNote, DataFile, Lake
from luminosity.io.lakes.delta_lake import DeltaLake
from luminosity.io.lakes.iceberg_lake import IcebergLake
from luminosity.io.lakes.write import WriteLake
from tests.io.lakes.places import PLACES

ROWS = 40
_BEGAN = 1_700_000_000
SCHEMA = pa.schema({"n": pa.int64()})


def _die(folder: Path, when: str) -> None:
    """Kill the run, once: its first process, and this worker."""
    marker = folder / when
    if not marker.exists():
        marker.touch()
        os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


class _DyingIceberg(IcebergLake):
    def commit(self, files: Sequence[DataFile], note: CommitNote, *, replace: bool) -> int:
        folder = Path(os.environ["DYING"])
        if note.number == 1:
            _die(folder, "before")
        version = super().commit(files, note, replace=replace)
        if note.number == 2:
            _die(folder, "after")
        return version


class _DyingDelta(DeltaLake):
    def commit(self, files: Sequence[DataFile], note: CommitNote, *, replace: bool) -> int:
        folder = Path(os.environ["DYING"])
        if note.number == 1:
            _die(folder, "before")
        version = super().commit(files, note, replace=replace)
        if note.number == 2:
            _die(folder, "after")
        return version


def _main(kind: str, folder: Path) -> None:
    (folder / "pid").write_text(str(os.getpid()))
    lake: Lake = PLACES[kind](folder).lake
    lake.__class__ = {"iceberg": _DyingIceberg, "delta": _DyingDelta}[kind]
    options = PipelineOptions([f"--checkpoint_dir={folder}/checkpoint", "--progress=off", "--cpu_workers=2"])
    with beam.Pipeline(LuminosityRunner(), options) as pipeline:
        ticks = pipeline | PeriodicImpulse(_BEGAN, _BEGAN + ROWS - 0.5, 1, apply_windowing=False)
        rows = ticks | beam.Map(lambda at: pa.record_batch({"n": [int(at) - _BEGAN]})).with_output_types(pa.RecordBatch)
        _ = rows | beam.WindowInto(FixedWindows(10)) | WriteLake(lake, schema=SCHEMA)


if __name__ == "__main__":
    from tests.io.lakes import dying

    dying._main(sys.argv[1], Path(sys.argv[2]))  # pyright: ignore[reportPrivateUsage]  # Workers import it by this name.
