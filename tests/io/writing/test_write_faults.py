"""Tests of WriteTable when workers die, steps raise or disks are full: every row once, or an error and no file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.io.filesystem import FileSystem
from apache_beam.io.localfilesystem import LocalFileSystem
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from luminosity import LuminosityRunner, WriteTable
from luminosity.errors import StepFailed, WriteError
from tests.both_runners import Pipelines, counters
from tests.io.written import everything_in, table_of
from tests.marks import first_time, note, notes, wait_for_file
from tests.processes import MOST_KILLS, kill_workers_of


def numbered(number: int, rows: int = 10) -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(range(number * rows, (number + 1) * rows)), "key": [str(number % 3)] * rows})


def noise(number: int, rows: int = 50_000) -> pa.RecordBatch:
    return pa.record_batch({"noise": pa.array([os.urandom(8) for _ in range(rows)], pa.binary(8))})


def run_ours(build: Callable[[beam.Pipeline], Any], *flags: str) -> Any:
    pipeline = beam.Pipeline(LuminosityRunner(), PipelineOptions(["--progress=off", "--cpu_workers=2", *flags]))
    build(pipeline)
    result = pipeline.run()
    result.wait_until_finish()
    return result


def run(pipelines: Pipelines, build: Callable[[beam.Pipeline], None]) -> None:
    with pipelines("--cpu_workers=2") as (pipeline, _):
        build(pipeline)


# ---- workers that die, bundles that are retried


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize(("name", "options"), [("out", {"partition_by": "key"}), ("out.parquet", {})], ids=str)
def test_every_row_once_while_workers_are_killed(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    path, at_work, killed = str(tmp_path / name), tmp_path / "at-work", tmp_path / "killed"

    def slowly(number: int) -> pa.RecordBatch:
        note(at_work, os.getpid())
        time.sleep(0.02)
        if number == 199:
            wait_for_file(killed)
        return numbered(number)

    def build(pipeline: beam.Pipeline) -> None:
        numbers = pipeline | beam.Create(range(200)) | beam.Reshuffle()
        _ = numbers | beam.Map(slowly).with_output_types(pa.RecordBatch) | WriteTable(path, **options)

    with kill_workers_of(os.getpid(), every_s=0.5, at_work=at_work, over=killed) as kills:
        result = run_ours(build)
    assert kills.count == MOST_KILLS
    assert sorted(table_of(path)["id"].to_pylist()) == list(range(2000))
    assert not [name for name in everything_in(tmp_path) if "luminosity" in name]
    assert counters(result)["rows_written"] == 2000


def test_a_worker_that_ends_while_it_writes(tmp_path: Path) -> None:
    flag = tmp_path / "died"

    class Dies(beam.DoFn):
        """Kills the worker after WriteTable has taken earlier rows."""

        def process(self, element: int) -> Any:
            yield numbered(element)
            if element == 7 and first_time(flag):
                os._exit(3)

    def build(pipeline: beam.Pipeline) -> None:
        table = pipeline | beam.Create(range(20)) | beam.ParDo(Dies()).with_output_types(pa.RecordBatch)
        _ = table | WriteTable(str(tmp_path / "out"))

    run_ours(build)
    assert flag.exists()
    assert sorted(table_of(tmp_path / "out")["id"].to_pylist()) == list(range(200))
    assert all(name.startswith("part-") for name in everything_in(tmp_path / "out"))


def test_a_step_before_it_that_fails_once(tmp_path: Path) -> None:
    flag = tmp_path / "failed"

    def fail_once(number: int) -> pa.RecordBatch:
        if number == 13 and first_time(flag):
            raise ValueError("not yet")
        return numbered(number)

    def build(pipeline: beam.Pipeline) -> None:
        table = pipeline | beam.Create(range(20)) | beam.Map(fail_once).with_output_types(pa.RecordBatch)
        _ = table | WriteTable(str(tmp_path / "out"), partition_by="key")

    run_ours(build)
    assert flag.exists()
    assert sorted(table_of(tmp_path / "out")["id"].to_pylist()) == list(range(200))


def test_a_step_after_it_that_fails_once(tmp_path: Path) -> None:
    """The step is fused with the last step of WriteTable, which runs again after it was done."""
    tries = tmp_path / "tries"

    def fail_once(name: str) -> str:
        note(tries)
        if len(notes(tries)) == 1:
            raise ValueError("not yet")
        return name

    def build(pipeline: beam.Pipeline) -> None:
        table = pipeline | beam.Create([numbered(n) for n in range(5)])
        _ = table | WriteTable(str(tmp_path / "out")) | beam.Map(fail_once)

    result = run_ours(build)
    assert len(notes(tries)) == 2
    assert sorted(table_of(tmp_path / "out")["id"].to_pylist()) == list(range(50))
    assert counters(result)["files_written"] == 1


def test_a_run_that_fails_leaves_nothing(tmp_path: Path, pipelines: Pipelines) -> None:
    def fail(number: int) -> pa.RecordBatch:
        if number == 13:
            raise ValueError("no good")
        return numbered(number)

    def build(pipeline: beam.Pipeline) -> None:
        table = pipeline | beam.Create(range(20)) | beam.Map(fail).with_output_types(pa.RecordBatch)
        _ = table | WriteTable(str(tmp_path / "out"))

    with pytest.raises((ValueError, StepFailed), match="no good"):
        run(pipelines, build)
    assert everything_in(tmp_path) in ([], ["out"])


def test_what_comes_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    """Another job writes the same table, and finishes first."""
    out = tmp_path / "out"

    def build(pipeline: beam.Pipeline) -> None:
        def interfere(number: int) -> pa.RecordBatch:
            out.mkdir(exist_ok=True)
            (out / "part-00000-of-00001.parquet").write_text("theirs")
            return numbered(number)

        table = pipeline | beam.Create([0]) | beam.Map(interfere).with_output_types(pa.RecordBatch)
        _ = table | WriteTable(str(out))

    with pytest.raises(StepFailed, match=r"found part-00000-of-00001\.parquet in the folder, expected it to be empty"):
        run_ours(build)
    assert (out / "part-00000-of-00001.parquet").read_text() == "theirs"


# ---- file systems that refuse


def test_a_full_disk(one_megabyte: Path, pipelines: Pipelines) -> None:
    out = one_megabyte / "out"

    def build(pipeline: beam.Pipeline) -> None:
        table = pipeline | beam.Create(range(10)) | beam.Reshuffle() | beam.Map(noise).with_output_types(pa.RecordBatch)
        _ = table | WriteTable(str(out), compression="none")

    with pytest.raises((WriteError, StepFailed), match="the disk is full") as caught:
        run(pipelines, build)
    message = str(caught.value)
    assert f"{out}: the disk is full (" in message
    assert "of 1.05 MB are free)" in message
    assert "free some space, write to a larger disk" in message
    assert everything_in(one_megabyte) in ([], ["out"])


@pytest.mark.parametrize("path", ["file/out", "file", "file/out.csv"])
def test_a_file_where_a_folder_should_be(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("keep")
    with pytest.raises(WriteError, match=r"a file.*, expected (a )?folder"):
        write(str(tmp_path / path))
    assert everything_in(tmp_path) == ["file"]


def test_a_folder_where_a_file_should_be(tmp_path: Path) -> None:
    (tmp_path / "out.csv").mkdir()
    with pytest.raises(WriteError, match=r"out\.csv: found a folder, expected a file .* \(.*out\.csv/\)"):
        write(str(tmp_path / "out.csv"))
    write(f"{tmp_path}/out.csv/")
    assert everything_in(tmp_path / "out.csv") == ["part-00000-of-00001.parquet"]


def test_a_folder_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system is patched, since tests may run as root."""

    def forbidden(*args: Any, **options: Any) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "out"))

    monkeypatch.setattr(os, "makedirs", forbidden)
    with pytest.raises(WriteError, match=r"out: this user may not write there \(.*Permission denied"):
        write(str(tmp_path / "out"))


def test_an_address_that_nobody_serves() -> None:
    with pytest.raises(WriteError, match=r"nowhere://a/out: no file system is known for nowhere://"):
        write("nowhere://a/out")


class Elsewhere(LocalFileSystem):
    """Local files under another scheme, so that WriteTable accesses them through Beam."""

    @classmethod
    def scheme(cls) -> str:
        return "elsewhere"

    def match(self, patterns: list[str], limits: Any = None) -> Any:
        results = super().match([_local(pattern) for pattern in patterns], limits)
        for result in results:
            for found in result.metadata_list:
                found.path = f"elsewhere://{found.path}"
        return results

    def create(self, path: str, *args: Any, **options: Any) -> Any:
        return super().create(_local(path), *args, **options)

    def open(self, path: str, *args: Any, **options: Any) -> Any:
        return super().open(_local(path), *args, **options)

    def mkdirs(self, path: str) -> None:
        super().mkdirs(_local(path))

    def exists(self, path: str) -> bool:
        return super().exists(_local(path))

    def rename(self, sources: list[str], destinations: list[str]) -> None:
        super().rename([_local(path) for path in sources], [_local(path) for path in destinations])

    def delete(self, paths: list[str]) -> None:
        LocalFileSystem(None).delete([_local(path) for path in paths])


def _local(path: str) -> str:
    return path.removeprefix("elsewhere://")


@pytest.mark.parametrize("path", ["out", "out.parquet", "out.csv.gz"])
def test_other_file_systems(tmp_path: Path, path: str) -> None:
    assert "elsewhere" in {system.scheme() for system in FileSystem.get_all_subclasses()}
    for options in ({}, {"if_exists": "replace"}):
        write(f"elsewhere://{tmp_path}/{path}", **options)
    with pytest.raises(WriteError, match="if_exists='replace'"):
        write(f"elsewhere://{tmp_path}/{path}")
    assert table_of(tmp_path / path)["id"].to_pylist() == list(range(10))
    assert not [name for name in everything_in(tmp_path) if "luminosity" in name]


def write(path: str, **options: Any) -> None:
    pipeline = beam.Pipeline(FnApiRunner(), PipelineOptions([]))
    _ = pipeline | beam.Create([numbered(0)]) | WriteTable(path, **options)
    pipeline.run().wait_until_finish()
