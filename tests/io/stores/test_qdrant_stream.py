"""WriteQdrant in a stream: the points of a window appear when it is complete, and none before."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.transforms import trigger
from apache_beam.transforms.window import FixedWindows, GlobalWindows, IntervalWindow, Sessions
from apache_beam.utils.timestamp import Timestamp
from qdrant_client import models

from luminosity import WriteQdrant
from luminosity.errors import StepFailed, StoreError
from luminosity.io.stores import write_shared
from luminosity.io.stores.address import StoreAddress
from luminosity.io.stores.embedded_qdrant import EmbeddedCollection
from luminosity.io.stores.qdrant_server import ServerCollection
from luminosity.io.writing.pane_steps import PaneOf
from tests.io.stores.qdrant_server import qdrant_server
from tests.io.stores.test_qdrant import stored
from tests.runners import IS_REFERENCE
from tests.streams import Notes, early_and_late_panes, run_stream, stream_of

pytestmark = pytest.mark.skipif(IS_REFERENCE, reason="it has no streams")


def rows(at: int, *ids: int, deleted: bool = False) -> list[tuple[pa.RecordBatch, int]]:
    columns = {"id": ids, "at": [at] * len(ids), "v": [[1.0, 0.5]] * len(ids), "_deleted": [deleted] * len(ids)}
    return [(pa.record_batch(columns), at)]


_WINDOW: Any = beam.DoFn.WindowParam


def _with_end(count: int, window: Any = _WINDOW) -> list[float]:
    return [float(window.end), count]


def _ids(folder: Path) -> list[int]:
    return sorted(stored(folder)) if (folder / "things").exists() else []


def test_the_points_of_a_window_appear_together_in_a_folder(tmp_path: Path) -> None:
    folder, notes = tmp_path / "stores", Notes(tmp_path / "notes")

    def build(pipeline: beam.Pipeline) -> None:
        events = rows(1, 1, 2), rows(2, 3), 10, rows(3, 99), rows(11, 4), rows(12, 5), 20, rows(21, 6)
        table = pipeline | stream_of(*events, element_type=pa.RecordBatch)
        _ = table | "See" >> notes.step(lambda table: [table["id"].to_pylist()[0], _ids(folder)])
        write = WriteQdrant(folder, "things", vectors="v", batch_size=1)
        counts = table | beam.WindowInto(FixedWindows(10)) | write
        _ = counts | beam.Map(_with_end) | "Write down" >> notes.step(list)

    run_stream(build)
    found = notes.read()
    seen = [[1, []], [3, []], [99, [1, 2, 3]], [4, [1, 2, 3]], [5, [1, 2, 3]], [6, [1, 2, 3, 4, 5]]]
    assert [note for note in found if isinstance(note[1], list)] == seen
    assert [note for note in found if not isinstance(note[1], list)] == [[end, 1] for end in (10, 10, 10, 20, 20, 30)]
    assert _ids(folder) == [1, 2, 3, 4, 5, 6]  # Row 99 came too late.
    (staged,) = folder.glob("things.staged-*")
    assert not list(staged.iterdir())


@pytest.mark.parametrize("is_server", [False, True])
def test_a_point_never_replaces_that_of_a_later_window(tmp_path: Path, is_server: bool) -> None:
    with qdrant_server() as server:
        where = server.url if is_server else tmp_path / "stores"

        def build(pipeline: beam.Pipeline) -> None:
            events = (
                rows(11, 1, 2),  # an early pane of the second window
                [*rows(5, 1, 3), *rows(4, 7)],
                12,
                rows(6, 2, 3, 4),  # a late pane of the first
                rows(6, 1, 7, deleted=True),
                100,
                rows(101, 6),
            )
            table = pipeline | stream_of(*events, element_type=pa.RecordBatch)
            _ = table | early_and_late_panes() | WriteQdrant(where, "things", vectors="v")

        run_stream(build)
        points = server.points("things") if is_server else stored(tmp_path / "stores")
        assert {id: point.payload["at"] for id, point in points.items()} == {1: 11, 2: 11, 3: 6, 4: 6, 6: 101}


def test_a_server_gets_points_when_the_trigger_fires(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "notes")
    with qdrant_server() as server:
        address = StoreAddress(server.url, "things")

        def build(pipeline: beam.Pipeline) -> None:
            table = pipeline | stream_of(rows(1, 1), rows(2, 2), rows(3, 3), element_type=pa.RecordBatch)
            _ = table | notes.step(lambda _, address=address: ServerCollection(address, lambda: None).count())
            windows = beam.WindowInto(
                GlobalWindows(),
                trigger=trigger.Repeatedly(trigger.AfterCount(2)),
                accumulation_mode=trigger.AccumulationMode.DISCARDING,
            )
            _ = table | windows | WriteQdrant(server.url, "things", vectors="v")

        server.store.create_collection("things", models.VectorParams(size=2, distance=models.Distance.COSINE))
        run_stream(build)
        assert notes.read() == [0, 0, 2]
        assert sorted(server.points("things")) == [1, 2, 3]


def test_a_bad_row_fails_the_run_before_its_window_is_written(tmp_path: Path) -> None:
    def build(pipeline: beam.Pipeline) -> None:
        bad = [(pa.record_batch({"id": [2], "at": [12], "v": [[None, 0.5]], "_deleted": [False]}), 12)]
        table = pipeline | stream_of(rows(1, 1), 10, rows(11, 3), bad, element_type=pa.RecordBatch)
        _ = table | beam.WindowInto(FixedWindows(10)) | WriteQdrant(tmp_path, "things", vectors="v")

    with pytest.raises(StepFailed):
        run_stream(build)
    assert _ids(tmp_path) == [1]


@pytest.mark.parametrize("windows", [GlobalWindows(), Sessions(10)])
def test_rows_without_panes_are_written_as_they_arrive(tmp_path: Path, windows: Any) -> None:
    notes = Notes(tmp_path / "notes")

    def build(pipeline: beam.Pipeline) -> None:
        table = pipeline | stream_of(rows(1, 1), rows(2, 2), element_type=pa.RecordBatch)
        _ = table | notes.step(lambda _: _ids(tmp_path))
        _ = table | beam.WindowInto(windows) | WriteQdrant(tmp_path, "things", vectors="v")

    run_stream(build)
    assert notes.read() == [[], [1]]


@pytest.mark.parametrize("where", ["stores", "http://localhost:1"])
def test_a_pipeline_is_built_without_warnings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.chdir(tmp_path)
    table = beam.Pipeline() | stream_of(element_type=pa.RecordBatch) | beam.WindowInto(FixedWindows(10))
    _ = table | WriteQdrant(where, "things", vectors="v")
    assert not [record.getMessage() for record in caplog.records]


def test_a_stream_does_not_replace_a_collection(tmp_path: Path) -> None:
    table = beam.Pipeline() | stream_of(element_type=pa.RecordBatch)
    with pytest.raises(StoreError, match="found unbounded input and if_exists='replace'"):
        _ = table | beam.WindowInto(FixedWindows(10)) | WriteQdrant(tmp_path, "c", vectors="v", if_exists="replace")


def test_readers_of_a_folder_wait_while_a_pane_is_written(tmp_path: Path) -> None:
    address = StoreAddress(str(tmp_path), "things", timeout=0.1)
    collection = EmbeddedCollection(address)
    collection.ensure({"": 2}, "cosine", create=True)

    def writes() -> Any:
        with pytest.raises(StoreError, match="waited"):
            EmbeddedCollection(address).count()
        yield [], []

    collection.write_together(writes())
    assert collection.count() == 0


def test_versions_are_ordered_by_window_then_by_pane() -> None:
    first, second = IntervalWindow(0, 10), IntervalWindow(10, 20)
    versions = [PaneOf(window, Timestamp(0), n, None).version for window, n in [(first, 0), (first, 1), (second, 0)]]
    assert versions == sorted(versions)


def test_a_pane_is_divided_into_parts_of_a_batch() -> None:
    (one, _), (two, _) = rows(0, 1)[0], rows(0, 1, 2)[0]
    pane = SimpleNamespace(index=0)
    found = list(write_shared._Parts(3).process((None, [one, one, two, one, two, two]), None, Timestamp(0), pane))
    assert [[batch.num_rows for batch in pane.content] for _, pane in found] == [[1, 1, 2], [1, 2], [2]]
