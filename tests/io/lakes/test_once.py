"""Every row is in the table once: repeated commits, other writers, killed workers, and a run that is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from deltalake import DeltaTable
from pyiceberg.table import Transaction

from luminosity import LuminosityRunner
from luminosity.errors import WriteError
from luminosity.io.lakes import commit as commit_module
from luminosity.io.lakes.commit import CommitOnce, Committer
from luminosity.io.lakes.contract import CommitNote, DataFile, NewTable
from luminosity.io.lakes.data_files import Begun, WriteFiles
from tests.io.deadly import Deadly
from tests.io.lakes.dying import ROWS
from tests.io.lakes.places import PLACES, Place, data_files, place

__all__ = ["place"]
pytestmark = pytest.mark.thorough
_SCHEMA = pa.schema({"n": pa.int64()})


def _begun(place: Place) -> Begun:
    place.lake.create(NewTable(_SCHEMA))
    return Begun(place.lake.layout(), "run-1", is_staged=False, is_durable=True)


def _files(place: Place, begun: Begun, *rows: int) -> list[DataFile]:
    step = WriteFiles(place.lake)
    step.start_bundle()
    step.process(pa.record_batch({"n": rows}, schema=_SCHEMA), begun, beam.transforms.window.GlobalWindow())
    return [windowed.value for windowed in step.finish_bundle()]


def _numbers(place: Place) -> list[int]:
    return sorted(place.rows()["n"].to_pylist())


def test_a_repeated_commit_is_recognised_and_files_of_failed_bundles_go(place: Place) -> None:
    begun = _begun(place)
    files = _files(place, begun, 1, 2)
    lost = _files(place, begun, 3)  # of a bundle that was repeated
    others = _files(place, Begun(begun.layout, "run-2", is_staged=False, is_durable=False), 4)  # of another run at work
    once = [next(iter(CommitOnce(Committer(place.lake)).process((files, begun)))).version for _ in range(3)]
    assert len(set(once)) == 1
    assert _numbers(place) == [1, 2]
    there = data_files(place)
    assert Path(lost[0].path).name not in there
    assert there == place.referenced() | {Path(others[0].path).name}


def test_a_failed_bundle_removes_its_files(place: Place) -> None:
    begun, step = _begun(place), WriteFiles(place.lake)
    step.start_bundle()
    step.process(pa.record_batch({"n": [1]}), begun, beam.transforms.window.GlobalWindow())
    assert len(data_files(place)) == 1
    with pytest.raises(WriteError, match=r"found the columns 'm', which the table does not have; it has n"):
        step.process(pa.record_batch({"m": [1]}), begun, beam.transforms.window.GlobalWindow())
    assert data_files(place) == set()


@pytest.mark.parametrize("intruder", ["another", "the same commit"])
def test_another_writer_commits_meanwhile(place: Place, intruder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the table and the commit; it may be the same commit, by a process that was thought dead."""
    monkeypatch.setattr(commit_module, "_FIRST_WAIT_S", 0.001)
    begun = _begun(place)
    files, note = _files(place, begun, 1, 2), CommitNote("run-1", 0)
    target, name = (
        (Transaction, "commit_transaction") if place.kind == "iceberg" else (DeltaTable, "create_write_transaction")
    )
    real: Any = getattr(target, name)

    def late(table: Any, *arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(target, name, real)
        if intruder == "another":
            place.append(pa.table({"n": [3]}))
        else:
            place.lake.commit(files, note, replace=False)
        return real(table, *arguments, **options)

    monkeypatch.setattr(target, name, late)
    Committer(place.lake).commit(files, note)
    assert _numbers(place) == ([1, 2, 3] if intruder == "another" else [1, 2])


def test_a_writer_that_is_always_faster_ends_the_run(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_module, "_FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(commit_module, "_ATTEMPTS", 2)
    begun = _begun(place)
    target, name = (
        (Transaction, "commit_transaction") if place.kind == "iceberg" else (DeltaTable, "create_write_transaction")
    )
    real: Any = getattr(target, name)
    is_inside = False

    def late(table: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal is_inside
        if not is_inside:
            is_inside = True
            place.lake.commit(_files(place, begun, 3), CommitNote(f"other-{len(place.versions())}", 0), replace=False)
            is_inside = False
        return real(table, *arguments, **options)

    monkeypatch.setattr(target, name, late)
    with pytest.raises(WriteError, match="2 attempts to commit failed because other writers were faster"):
        Committer(place.lake).commit(_files(place, begun, 1), CommitNote("run-1", 0))
    assert _numbers(place) == [3, 3]


def _signed(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.record_batch({"n": batch.column("id").cast(pa.int64())})


def test_every_row_once_while_workers_are_killed(place: Place, tmp_path: Path) -> None:
    kills = tmp_path / "kills"
    kills.mkdir()
    options = PipelineOptions(["--cpu_workers=2", "--progress=off"])
    with beam.Pipeline(LuminosityRunner(), options) as pipeline:
        firsts = pipeline | beam.Create(range(0, 4000, 100)) | beam.Reshuffle()
        rows = firsts | beam.ParDo(Deadly(kills, {500, 2500}, 100, 0.05)).with_output_types(pa.RecordBatch)
        _ = rows | beam.Map(_signed).with_output_types(pa.RecordBatch) | place.write(schema=_SCHEMA)
    assert {path.name for path in kills.iterdir()} == {"500", "2500"}
    assert _numbers(place) == list(range(4000))
    assert data_files(place) == place.referenced()


@pytest.mark.parametrize("kind", sorted(PLACES))
def test_a_stream_whose_run_is_killed_before_and_after_a_commit(kind: str, tmp_path: Path) -> None:
    place = PLACES[kind](tmp_path)
    codes: list[int] = []
    while not codes or codes[-1] != 0:
        assert len(codes) < 3, codes
        job = [sys.executable, "-m", "tests.io.lakes.dying", kind, str(tmp_path)]
        codes.append(
            subprocess.run(job, env={**os.environ, "DYING": str(tmp_path)}, timeout=120, check=False).returncode
        )
    assert codes == [-9, -9, 0]
    assert _numbers(place) == list(range(ROWS))
    notes = [note for note in _notes(place) if "luminosity.commit" in note]
    assert [note["luminosity.commit"] for note in notes] == [str(number) for number in range(ROWS // 10)]
    assert len({note["luminosity.run"] for note in notes}) == 1
    assert len({note["luminosity.window"] for note in notes}) == ROWS // 10


def _notes(place: Place) -> list[dict[str, Any]]:
    if place.kind == "iceberg":
        return [snapshot.summary.additional_properties for snapshot in place.table.snapshots()]
    return list(reversed(place.table.history()))
