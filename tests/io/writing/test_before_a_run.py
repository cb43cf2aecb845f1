"""Tests of what is known before a run: outputs that can't be written, or that another run writes right now."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity import LuminosityRunner, WriteLance, WriteQdrant, WriteTable
from luminosity.errors import StoreError, WriteError
from luminosity.io.run_owner import RunOwner
from luminosity.io.writing.destination import Destination
from tests.io.written import everything_in
from tests.processes import waiting_process

BATCH = [pa.record_batch({"id": [1, 2], "half": [0.5, 0.5]})]


@pytest.fixture
def forbidden() -> Iterator[Path]:
    """A folder in which this user may not write, even if tests run as root.

    It is not in ``tmp_path``: each start of pytest closes the folder around that one to other users.
    """
    with tempfile.TemporaryDirectory() as around:
        os.chmod(around, 0o755)
        folder = Path(around, "closed")
        folder.mkdir()
        folder.chmod(0o555)
        before = os.geteuid()
        if before == 0:
            os.seteuid(65534)
        yield folder
        if before == 0:
            os.seteuid(0)
        folder.chmod(0o755)


@pytest.mark.parametrize("name", ["out", "a/b/out", "out.csv"])
def test_a_folder_that_is_closed_is_refused_before_the_run(forbidden: Path, name: str) -> None:
    for if_exists in ("fail", "replace", "append"):
        if name.endswith(".csv") and if_exists == "append":
            continue
        writing = WriteTable(forbidden / name, if_exists=if_exists)  # type: ignore[arg-type]
        with pytest.raises(WriteError, match=f"{name}: this user may not write to {forbidden}; choose another path"):
            writing.check(BATCH[0].schema)
        with pytest.raises(WriteError, match="this user may not write"):
            _ = beam.Pipeline() | beam.Create(BATCH) | writing
    with pytest.raises(StoreError, match=f"can't be written: this user may not write to {forbidden}"):
        _ = beam.Pipeline() | beam.Create(BATCH) | WriteQdrant(forbidden / "store", "c", vectors="half")
    with pytest.raises(StoreError, match=f"this user may not write to {forbidden}"):
        _ = beam.Pipeline() | beam.Create(BATCH) | WriteLance(forbidden / "a.lance")


def test_a_read_only_disk_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class ReadOnly:
        f_flag = os.ST_RDONLY

    monkeypatch.setattr(os, "access", lambda *args, **options: False)
    monkeypatch.setattr(os, "statvfs", lambda path: ReadOnly)
    with pytest.raises(WriteError, match=rf"out: the disk is read-only at {tmp_path}"):
        _ = beam.Pipeline() | beam.Create(BATCH) | WriteTable(tmp_path / "out")


@pytest.mark.parametrize("path", ["file/out", "file/a/b/out.csv"])
def test_a_file_in_the_path_is_refused_before_the_run(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("keep")
    with pytest.raises(WriteError, match=rf"found a file at {tmp_path}/file, expected a folder"):
        _ = beam.Pipeline() | beam.Create(BATCH) | WriteTable(tmp_path / path)


@pytest.mark.parametrize("name", ["out", "out.parquet"])
def test_a_table_that_another_run_writes_is_refused_before_the_run(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name if name == "out" else tmp_path
    path, other_file = tmp_path / name, tmp_path / "other.parquet"
    with waiting_process() as other:
        destination = Destination.of(str(path)).for_another_run()
        mine = RunOwner.current()
        theirs = destination.temporary_folder.replace(str(mine), str(RunOwner.of(other)))
        os.makedirs(theirs)
        for if_exists in ("fail", "replace"):
            message = rf"process {other} \(.*input.*\) is writing it right now; wait until that run has ended"
            with pytest.raises(WriteError, match=message):
                WriteTable(path, if_exists=if_exists).check(BATCH[0].schema)  # type: ignore[arg-type]
        WriteTable(other_file).check(BATCH[0].schema)  # in the same folder
        if name == "out":
            WriteTable(path, if_exists="append").check(BATCH[0].schema)
    WriteTable(path, if_exists="replace").check(BATCH[0].schema)
    with beam.Pipeline("FnApiRunner") as pipeline:
        _ = pipeline | beam.Create(BATCH) | WriteTable(path, if_exists="replace")
    assert not [name for name in os.listdir(folder) if name.startswith(".luminosity")]  # It was left by a killed run.


def test_a_run_marks_its_table_from_the_start(tmp_path: Path) -> None:
    """Other runs see who writes it while the models compute, before the first file is written."""

    def look(batch: pa.RecordBatch) -> pa.RecordBatch:
        give_up_at = time.monotonic() + 60
        while not (found := list(tmp_path.glob("out/.luminosity-write-*"))) and time.monotonic() < give_up_at:
            time.sleep(0.02)
        assert [RunOwner.in_name(each.name) for each in found] == [owner]
        return batch

    owner = RunOwner.current()

    def build(pipeline: beam.Pipeline) -> None:
        table = pipeline | beam.Create(BATCH) | beam.Map(look).with_output_types(pa.RecordBatch)
        _ = table | beam.Reshuffle() | WriteTable(tmp_path / "out")

    pipeline = beam.Pipeline(LuminosityRunner(), PipelineOptions(["--progress=off", "--cpu_workers=1"]))
    build(pipeline)
    pipeline.run().wait_until_finish()
    assert everything_in(tmp_path / "out") == ["part-00000-of-00001.parquet"]
