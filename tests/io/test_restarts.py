"""Sinks whose run is killed and continued by another process: names stay the same, and steps may be repeated."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import apache_beam as beam
import lancedb
import pyarrow as pa
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms.window import FixedWindows

from luminosity import LuminosityRunner, WriteLance, WriteQdrant, WriteTable
from luminosity._shared.shared_files import try_lock
from luminosity.core import TEMPORARY_FOLDER
from luminosity.engine.options import EngineConfig
from luminosity.errors import StoreError, WriteError
from luminosity.io.run_owner import RunOwner, owner_in_name
from luminosity.io.stores import write_lance
from luminosity.io.stores.address import StoreAddress
from luminosity.io.stores.embedded_qdrant import EmbeddedCollection
from luminosity.io.stores.kinds import open_store
from luminosity.io.stores.points import Point
from luminosity.io.stores.qdrant_server import ServerCollection
from luminosity.io.stores.staging import StagedFile, StagingFolder
from luminosity.io.stores.store import Target, WriteMode
from luminosity.io.writing import existing, window_files
from luminosity.io.writing.destination import Destination
from luminosity.io.writing.finish_step import BeginDoFn, FinishDoFn, finish
from luminosity.io.writing.table_files import WrittenFile
from luminosity.io.writing.write_step import OpenFiles
from luminosity.runs.run_ids import META_KEY, CheckpointedRun, RunIdentity, machine_name, run_identity, run_to_store
from tests.io.stores.qdrant_server import qdrant_server
from tests.io.written import rows_of
from tests.streams import names_in, stream_of, tables

_ID = "0123456789ab"
_KILLED = 9


def _identity(checkpoint: Path, *, is_resumed: bool = False) -> RunIdentity:
    """Return the identity that a start of the run has, after its engine has written it to the folder."""
    run = CheckpointedRun(machine_name(), _ID)
    checkpoint.mkdir(parents=True, exist_ok=True)
    _store(checkpoint, run)
    return RunIdentity(run, str(checkpoint), is_resumed)


def _store(checkpoint: Path, run: CheckpointedRun | None) -> None:
    with contextlib.closing(sqlite3.connect(checkpoint / "checkpoint.sqlite", isolation_level=None)) as database:
        database.execute("CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT)")
        database.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (META_KEY, str(run)))


def _destination(tmp_path: Path, **options: Any) -> Destination:
    """Return the destination of another start of the same run."""
    return Destination.of(str(tmp_path / "out"), **options).for_another_run(_identity(tmp_path / "checkpoint"))


def _written(destination: Destination, *rows: int) -> list[WrittenFile]:
    files: list[WrittenFile] = []
    for row in rows:
        opened = OpenFiles(destination)
        opened.add(pa.record_batch({"n": [row]}))
        files += opened.close()
    return files


def _is_killed(call: int, work: Callable[[], object]) -> bool:
    """Do the work in a process that dies at its n-th change of files. Returns whether it came to that."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == _KILLED
    left = call

    def dying(real: Any) -> Any:
        def change(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            if not left:
                os._exit(_KILLED)
            left -= 1
            return real(*arguments, **options)

        return change

    try:
        for name in ("replace", "remove", "rename", "unlink", "rmdir"):
            setattr(os, name, dying(getattr(os, name)))
        work()
    finally:
        os._exit(0)


def _pipeline(*flags: str) -> beam.Pipeline:
    return beam.Pipeline(runner=LuminosityRunner(), options=PipelineOptions(list(flags)))


def test_the_identity_of_a_run_is_kept_in_its_checkpoint(tmp_path: Path) -> None:
    flag = f"--checkpoint_dir={tmp_path}"
    assert not run_identity(_pipeline()).is_durable
    pipeline = _pipeline(flag)
    first = run_identity(pipeline)
    assert run_identity(pipeline) is first  # for all its transforms
    assert first.run != run_identity(_pipeline(flag)).run  # No run has begun.
    assert not os.listdir(tmp_path)
    assert (first.is_durable, first.is_resumed, first.checkpoint_dir) == (True, False, str(tmp_path))
    stored = run_to_store(pipeline.options)
    assert stored == EngineConfig.of(pipeline.options).checkpoint_run == str(first.run)
    _store(tmp_path, CheckpointedRun.in_name(stored))
    second = run_identity(_pipeline(flag))
    assert (second.run, second.is_resumed) == (first.run, True)
    anew = run_identity(_pipeline(flag, "--restart"))
    assert anew.run != first.run
    assert not anew.is_resumed
    assert not run_identity(beam.Pipeline("FnApiRunner", PipelineOptions([flag]))).is_durable
    (tmp_path / "checkpoint.sqlite").write_bytes(b"no database" * 100)
    assert not run_identity(_pipeline(flag)).is_resumed  # The engine says what is wrong.


def test_all_starts_of_a_run_have_the_same_folder_and_others_have_not(tmp_path: Path) -> None:
    first, second = (_destination(tmp_path).temporary_folder for _ in range(2))
    assert first == second
    identity = _identity(tmp_path / "checkpoint")
    two = [Destination.of(str(tmp_path / "out"), if_exists="append").for_another_run(identity) for _ in range(2)]
    assert two[0].temporary_folder != two[1].temporary_folder
    assert len({Destination.of("x").for_another_run().temporary_folder for _ in range(2)}) == 2


@pytest.mark.parametrize("if_exists", ["fail", "replace", "append"])
@pytest.mark.parametrize("old", [0, 1])
def test_a_table_whose_run_is_killed_while_it_is_published(tmp_path: Path, if_exists: str, old: int) -> None:
    """At each change of files; then the last step is repeated by another process, and once more."""
    call, was_killed = 0, True
    while was_killed:
        folder = tmp_path / str(call)
        (folder / "out").mkdir(parents=True)
        expected, names = [{"n": 1}, {"n": 2}], list[str]()
        if old and if_exists != "fail":
            (folder / "out" / "old.jsonl").write_text('{"n": 0}\n')
            expected = [{"n": 0}, *expected] if if_exists == "append" else expected

        def options() -> dict[str, Any]:
            return {"if_exists": if_exists, "format": "jsonl"}

        destination = _destination(folder, **options())
        list(BeginDoFn(destination).process(None))
        files = _written(destination, 1, 2)
        _written(destination, 3)  # of a bundle that was not committed: no element names it
        was_killed = _is_killed(call, lambda d=destination, f=files: finish(d, f))
        for _ in range(2):
            again = _destination(folder, **options())
            names = list(FinishDoFn(again).process((files, [])))
        found = sorted(
            (row for name in names_in(folder / "out") for row in rows_of(folder / "out" / name)),
            key=lambda row: row["n"],
        )
        assert found == expected
        assert all(os.path.exists(name) for name in names)
        assert not [name for name in os.listdir(folder / "out") if name.startswith(".")]
        call += 1
    assert call > 3


def test_a_window_whose_run_is_killed_while_it_is_published(tmp_path: Path) -> None:
    call, was_killed = 0, True
    while was_killed:
        folder = tmp_path / str(call)
        destination = _destination(folder, format="jsonl")
        (begun,) = window_files.BeginStreamDoFn(destination).process(None)
        files = _written(destination, 1, 2)
        was_killed = _is_killed(
            call, lambda d=destination, f=files, b=begun: window_files.publish_pane(d, list(f), "w", b)
        )
        again = _destination(folder, format="jsonl")
        # The checkpoint may be older than the end of the first step: then it is repeated, too.
        (begun,) = window_files.BeginStreamDoFn(again).process(None)
        for _ in range(2):
            list(window_files.PublishPaneDoFn(again).process(("w", list(files)), [begun]))
        assert [row for name in names_in(folder / "out") for row in rows_of(folder / "out" / name)] == [
            {"n": 1},
            {"n": 2},
        ]
        call += 1
    assert call > 2


def test_files_of_another_program_are_not_taken_for_those_of_the_run(tmp_path: Path) -> None:
    destination = _destination(tmp_path)
    list(BeginDoFn(destination).process(None))
    files = _written(destination, 1)
    (tmp_path / "out" / "theirs.parquet").touch()
    with pytest.raises(WriteError, match=r"found theirs\.parquet in the folder"):
        finish(_destination(tmp_path), files)


def test_other_runs_leave_what_may_be_continued(tmp_path: Path) -> None:
    """They refuse to write while the run is at work, and remove its files when its checkpoint is no more."""
    mine = _destination(tmp_path)
    list(BeginDoFn(mine).process(None))
    folder, checkpoint = Path(mine.temporary_folder), tmp_path / "checkpoint"
    other = Destination.of(mine.path, if_exists="replace").for_another_run()
    existing.check_access(other)
    assert existing.leftovers(other) == []
    lock = os.open(checkpoint / "lock", os.O_CREAT | os.O_RDWR)
    try:
        assert try_lock(lock)
        with pytest.raises(WriteError, match="a run with a checkpoint is writing it right now"):
            existing.check_access(other)
        existing.check_access(_destination(tmp_path))  # The engine says that the run is at work already.
        assert existing.leftovers(other) == []
    finally:
        os.close(lock)
    existing.check_access(other)
    _store(checkpoint, CheckpointedRun(machine_name(), "f" * 12))  # It was started anew.
    assert existing.leftovers(other) == [str(folder)]
    elsewhere = CheckpointedRun("abcdef", _ID)
    assert elsewhere.is_alive(str(folder)) is None


def _applied(tmp_path: Path, sink: beam.PTransform[Any, Any], identity: RunIdentity, *, is_stream: bool = False) -> Any:
    """Return the proto of a pipeline that is built but does not run."""
    from luminosity.runs import run_ids

    pipeline = beam.Pipeline(runner=LuminosityRunner())
    run_ids._identities[pipeline] = identity  # pyright: ignore[reportPrivateUsage]
    rows: Any = pipeline | (
        stream_of(tables(1), element_type=pa.RecordBatch) if is_stream else beam.Create([pa.record_batch({"n": [1]})])
    )
    if is_stream:
        rows |= beam.WindowInto(FixedWindows(10))
    _ = rows | "Sink" >> sink
    return pipeline.to_runner_api()


def test_a_run_that_continues_may_find_its_own_table(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "part.parquet").touch()
    (tmp_path / "points").mkdir()
    sinks: list[Callable[[], beam.PTransform[Any, Any]]] = [
        lambda: WriteTable(tmp_path / "out"),
        lambda: WriteQdrant(tmp_path, "points", vectors="vector", if_exists="fail"),
    ]
    for sink in sinks:
        with pytest.raises((WriteError, StoreError), match=r"expected it to be empty|exists already"):
            _applied(tmp_path, sink(), _identity(checkpoint))
        _applied(tmp_path, sink(), _identity(checkpoint, is_resumed=True))


@pytest.mark.parametrize("is_stream", [False, True])
def test_steps_that_publish_have_stable_input(tmp_path: Path, is_stream: bool) -> None:
    """With a checkpoint, there is a Reshuffle before each, and the run knows the folders that it removes at its end."""
    sinks: list[Callable[[], beam.PTransform[Any, Any]]] = [
        lambda: WriteTable(tmp_path / "out"),
        lambda: WriteLance(tmp_path / "out.lance"),
        lambda: WriteLance(tmp_path / "out.lance", mode="merge", key="n"),
        lambda: WriteQdrant(tmp_path, "points", vectors="vector"),
        lambda: WriteQdrant("http://localhost:1", "points", vectors="vector"),
    ]
    for sink in sinks:
        for identity in (RunIdentity(), _identity(tmp_path / "checkpoint")):
            proto = _applied(tmp_path, sink(), identity, is_stream=is_stream)
            transforms = proto.components.transforms.values()
            stable = [each for each in transforms if each.unique_name.endswith("/Stable")]
            assert bool(stable) == identity.is_durable
            folders = [
                each.annotations[TEMPORARY_FOLDER] for each in transforms if TEMPORARY_FOLDER in each.annotations
            ]
            assert not identity.is_durable or all(_ID.encode() in folder for folder in folders)


def _staging(tmp_path: Path) -> StagingFolder:
    return StagingFolder.of(str(tmp_path / "things"), _identity(tmp_path / "checkpoint"))


def _staged(folder: str, *rows: int) -> tuple[str, int]:
    file = StagedFile(folder)
    file.write(pa.record_batch({"n": list(rows)}))
    file.close()
    return file.path, len(rows)


def test_the_folder_of_staged_rows_belongs_to_the_run(tmp_path: Path) -> None:
    folder = _staging(tmp_path).make()
    assert _staging(tmp_path).make() == folder
    theirs = StagingFolder.of(str(tmp_path / "things"), RunIdentity()).make()
    assert theirs != StagingFolder.of(str(tmp_path / "things"), RunIdentity()).make()
    assert os.path.isdir(folder)
    assert isinstance(owner_in_name(theirs), RunOwner)
    (tmp_path / "checkpoint" / "checkpoint.sqlite").unlink()
    StagingFolder.of(str(tmp_path / "things"), RunIdentity()).make()
    assert not os.path.exists(folder)


@pytest.mark.parametrize("mode", ["append", "overwrite", "merge"])
def test_a_dataset_is_committed_once(tmp_path: Path, mode: Any) -> None:
    path = str(tmp_path / "things.lance")
    key = "n" if mode == "merge" else None
    folder = _staging(tmp_path).make()
    staged = [_staged(folder, 1, 2), _staged(folder, 3)]
    _staged(folder, 4)  # of a bundle that was not committed
    for _ in range(2):
        assert write_lance._Writer(path, mode, key, False).commit(staged, folder) == [path]  # pyright: ignore[reportPrivateUsage]
    assert lancedb.connect(tmp_path).open_table("things").count_rows() == 3


def test_the_rows_of_a_window_are_appended_once(tmp_path: Path) -> None:
    path = str(tmp_path / "things.lance")
    folder = _staging(tmp_path).make()
    staged = [_staged(folder, 1, 2)]
    writer = write_lance._Writer(path, "append", None, False)  # pyright: ignore[reportPrivateUsage]
    for _ in range(2):
        writer.commit_pane(staged, (), folder)
    writer.commit_pane([_staged(folder, 3)], (), folder)
    assert lancedb.connect(tmp_path).open_table("things").count_rows() == 3


@pytest.mark.parametrize("if_exists", ["fail", "replace", "append"])
def test_a_collection_in_a_folder_is_published_once(tmp_path: Path, if_exists: Any) -> None:
    collection = EmbeddedCollection(StoreAddress(str(tmp_path), "things"))
    mode = WriteMode("cosine", if_exists=if_exists)
    points = [Point(number, {"": [1.0, 0.0]}, {}) for number in range(3)]

    def publish(run: str, mode: WriteMode = mode, points: list[Point] = points) -> int:
        written: list[Any] = []

        def writes() -> Any:
            for point in points:
                written.append(point)
                yield [point], []

        collection.publish(writes(), {"": 2}, mode, run)
        return len(written)

    assert not collection.is_published_by("run-1")
    assert publish("run-1") == publish("run-1") == 3  # The second time, rows are counted and not written.
    assert collection.is_published_by("run-1")
    assert collection.count() == 3
    if if_exists == "fail":
        with pytest.raises(StoreError, match="exists already"):
            publish("run-2")
    publish("run-2", WriteMode("cosine", if_exists="append"), [Point(7, {"": [1.0, 0.0]}, {})])
    assert not collection.is_published_by("run-1")
    assert collection.count() == 4


def test_a_run_removes_the_collection_that_its_first_start_left_on_a_server() -> None:
    with qdrant_server() as server:
        address = StoreAddress(server.url, "things", timeout=20)
        mode = WriteMode("cosine", if_exists="replace")
        mine, other = str(CheckpointedRun(machine_name(), _ID)), str(CheckpointedRun(machine_name(), "f" * 12))
        store = ServerCollection(address)
        first, theirs = store.begin(mode, mine), store.begin(mode, other)
        for name in (first, theirs):
            open_store(replace(address, collection=name), lambda: None).ensure({"": 2}, "cosine", create=True)
        assert store.begin(mode, mine) != first
        assert [each.name for each in server.store.get_collections().collections] == [theirs]


@pytest.mark.parametrize("replaces", [False, True])
def test_an_alias_is_set_once(replaces: bool) -> None:
    with qdrant_server() as server:
        address = StoreAddress(server.url, "things", timeout=20)
        owner, staged = str(CheckpointedRun(machine_name(), _ID)), ""
        for _ in range(1 + replaces):
            mode = WriteMode("cosine", if_exists="replace")
            staged = ServerCollection(address).begin(mode, owner)
            open_store(replace(address, collection=staged), lambda: None).ensure({"": 2}, "cosine", create=True)
            before = server.store.get_aliases().aliases
            target = Target(staged=staged, replaces=before[0].collection_name if before else "")
            for _ in range(2):
                ServerCollection(address).publish(target, mode)
        assert [each.name for each in server.store.get_collections().collections] == [staged]
        assert [each.collection_name for each in server.store.get_aliases().aliases] == [staged]


def test_files_are_on_the_disk_before_a_checkpoint_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []

    def sync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", sync)
    _written(Destination.of(str(tmp_path / "out")).for_another_run(), 1)
    assert synced == []
    destination = _destination(tmp_path)
    files = _written(destination, 1, 2)
    assert synced == [path for file in files for path in (file.path, destination.temporary_folder)]
    synced.clear()
    finish(destination, files)
    assert synced[-1] == destination.path
    folder = _staging(tmp_path).make()
    synced.clear()
    assert [_staged(folder, 1)[0], folder] == synced
