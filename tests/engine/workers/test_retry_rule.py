"""Tests of the one rule that decides whether a failed bundle is retried."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.io.filesystem import BeamIOError
from apache_beam.io.filesystems import FileSystems
from pyarrow import parquet

from luminosity import ReadTable
from luminosity.engine.workers.failure import Failure
from luminosity.errors import (
    EndpointError,
    HandlerError,
    HostUnavailable,
    LuminosityError,
    MissingExtra,
    ModelFailed,
    ModelTooLarge,
    ModelUnavailable,
    StepFailed,
    StoreError,
    TableError,
    WriteError,
    may_pass,
)
from luminosity.extras import require
from luminosity.io.formats import Format
from luminosity.io.reading.find_files import TableFile, readable
from luminosity.io.writing.filesystem import clear_errors
from tests.runners import IS_REFERENCE, run


def caused(error: LuminosityError, cause: BaseException) -> LuminosityError:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        *(kind("no") for kind in (TableError, WriteError, StoreError, HandlerError, ModelTooLarge, ModelUnavailable)),
        MissingExtra("torch is not installed"),
        EndpointError("401"),
        *(OSError(number, "no") for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)),
        OSError(OSError(errno.ENOSPC, "no")),
        BeamIOError("copy failed", {("a", "b"): OSError(errno.EROFS, "no")}),
        ModuleNotFoundError("no module named 'sklearn'", name="sklearn"),
        caused(TableError("damaged"), pa.ArrowInvalid("no magic bytes")),
        caused(WriteError("full"), OSError(errno.ENOSPC, "no")),
    ],
    ids=repr,
)
def test_what_stays_as_it_is_does_not_pass(error: Exception) -> None:
    assert not may_pass(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("flaky"),
        KeyError("text"),
        OSError("no number"),
        FileNotFoundError(errno.ENOENT, "another process may write it"),
        FileExistsError(errno.EEXIST, "another worker was first"),
        pa.ArrowInvalid("of user code"),
        ConnectionResetError(errno.ECONNRESET, "reset"),
        TimeoutError("slow"),
        MemoryError(),
        ModelFailed("its process ended"),
        HostUnavailable("no answer"),
        EndpointError("503", may_pass=True),
        caused(TableError("can't be read"), ConnectionResetError("reset")),
        caused(WriteError("can't be written"), BeamIOError("no", {"gs://a": TimeoutError("slow")})),
        caused(StoreError("no"), caused(StoreError("inner"), OSError(errno.ESTALE, "stale"))),
    ],
    ids=repr,
)
def test_what_may_change_passes(error: Exception) -> None:
    assert may_pass(error)


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "gone"),
        FileExistsError(errno.EEXIST, "there"),
        pa.ArrowInvalid("damaged"),
        BeamIOError("rename failed", {"a": FileNotFoundError(errno.ENOENT, "gone")}),
    ],
    ids=repr,
)
def test_files_stay_as_they_are_for_readers_and_writers(error: Exception) -> None:
    assert not may_pass(error, in_user_code=False)


def failure_of(work: Callable[[], object]) -> Failure:
    """Describe what ``work`` raises as if only Beam and this product had called it."""
    try:
        work()
    except Exception as error:
        trace = error.__traceback__
        own = (failure_of.__code__, getattr(work, "__code__", None))
        while trace is not None and trace.tb_frame.f_code in own:
            trace = trace.tb_next
        return Failure.of(error.with_traceback(trace))
    raise AssertionError("found no error, expected one")


def test_the_frames_of_compiled_libraries_are_not_user_code(tmp_path: Path) -> None:
    path = tmp_path / "damaged.parquet"
    path.write_bytes(b"PAR1" + b"\xff" * 100 + b"PAR1")
    failure = failure_of(lambda: parquet.ParquetFile(path))
    assert failure.exception.startswith("ArrowInvalid")
    assert not failure.may_pass
    assert ".pxi" not in failure.location


def test_a_missing_file_passes_only_if_user_code_opens_it(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.pkl")
    assert not failure_of(lambda: FileSystems.open(missing)).may_pass

    def load() -> None:
        with open(missing):
            pass

    def user_code() -> None:
        load()

    assert failure_of(user_code).may_pass


def test_a_missing_extra_does_not_pass() -> None:
    assert not failure_of(lambda: require("luminosity_has_no_such_module", "torch")).may_pass


@pytest.mark.parametrize(
    ("path", "error", "passes"),
    [
        ("/data/a.parquet", OSError("Couldn't deserialize thrift"), False),
        ("/data/a.parquet", OSError(errno.EIO, "the disk is in trouble"), True),
        ("gs://bucket/a.parquet", OSError("503 from the store"), True),
        ("gs://bucket/a.parquet", pa.ArrowInvalid("no magic bytes"), False),
        ("gs://bucket/a.parquet", FileNotFoundError(errno.ENOENT, "gone"), False),
    ],
)
def test_tables_on_a_network_may_be_readable_later(path: str, error: Exception, passes: bool) -> None:
    with pytest.raises(TableError) as caught, readable(TableFile(path, 8, Format.PARQUET)):
        raise error
    assert may_pass(caught.value) is passes


@pytest.mark.parametrize(
    ("path", "error", "passes"),
    [
        ("/data/out", OSError(errno.ENOSPC, "full"), False),
        ("/data/out", OSError("odd"), False),
        ("gs://bucket/out", OSError("503 from the store"), True),
        ("gs://bucket/out", PermissionError(errno.EACCES, "no"), False),
    ],
)
def test_tables_on_a_network_may_be_writable_later(path: str, error: Exception, passes: bool) -> None:
    with pytest.raises(WriteError) as caught, clear_errors(path):
        raise error
    assert may_pass(caught.value) is passes


@pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does")
def test_a_damaged_file_is_read_once_and_a_flaky_step_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "table.parquet"
    parquet.write_table(pa.table({"a": range(1000)}), path)
    table = ReadTable(str(path))
    data = bytearray(path.read_bytes())
    data[50:500] = b"\xff" * 450
    path.write_bytes(data)

    with pytest.raises(StepFailed) as caught:
        run(lambda pipeline: pipeline | "Damaged" >> table, "--cpu_workers=1")
    assert caught.value.headline.startswith("step 'Damaged' failed: TableError")
    assert "attempt" not in caplog.text

    def flaky(element: int) -> int:
        with open(tmp_path / "calls", "a") as file:
            file.write("x")
        if os.path.getsize(tmp_path / "calls") < 3:
            raise ValueError("flaky")
        return element

    run(lambda pipeline: pipeline | beam.Create([1]) | beam.Map(flaky), "--cpu_workers=1")
    assert (tmp_path / "calls").read_text() == "xxx"
